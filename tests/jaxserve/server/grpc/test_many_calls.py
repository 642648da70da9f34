"""Thousands of calls at once on one connection.

Origin: gRPC refused half of them with a bare UNAVAILABLE, since its protection against reset
streams lowered the number of streams below the one that it had told the client.
"""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.jaxserve.server.grpc.undisturbed import undisturbed
from tests.jaxserve.server.harness import running

CALLS = 3000


@pytest.mark.system
def test_all_are_answered_or_refused_with_a_hint(tmp_path: Path) -> None:
    """The client is a process of its own: in one with the server, gRPC cancels a few calls."""
    client = ("-m", "tests.jaxserve.server.grpc.many_calls")

    async def main() -> None:
        async with running(tmp_path) as server, undisturbed(server):
            process = await asyncio.create_subprocess_exec(
                sys.executable, *client, server.address, str(CALLS), stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate()
            found = json.loads(output)
            assert found.keys() <= {"OK", "RESOURCE_EXHAUSTED"}, found
            assert sum(found.values()) == CALLS and found["OK"] > CALLS / 3, found

    asyncio.run(main())
