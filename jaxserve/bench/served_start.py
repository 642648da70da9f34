"""A start of `jaxserve serve` in a process of its own, timed until its first answer."""

import asyncio
import time
from collections.abc import Sequence

from jaxserve.bench.own_server import HOST, free_ports, running, serve_command
from jaxserve.client import AsyncClient

READY_SECONDS = 3600.0  # that a start may take


def seconds_of_start(flags: Sequence[str], leaves_all: bool) -> dict[str, float]:
    """Start a server and ask it for one token.

    Args:
        flags: Flags of serve.
        leaves_all: Whether the server ends only when every step is compiled, as a cold start does
            whose cache the next start reads.

    Returns:
        Seconds until the server was ready, from the start of the process, and from then until its
        first answer.

    Raises:
        ConfigError: The server ended before it was ready.
    """
    return asyncio.run(_seconds_of_start(flags, leaves_all))


async def _seconds_of_start(flags: Sequence[str], leaves_all: bool) -> dict[str, float]:
    port, http_port = free_ports(2)
    address = f"{HOST}:{port}"
    began = time.monotonic()
    async with running(serve_command(port, http_port, flags), address, READY_SECONDS):
        ready = time.monotonic()
        async with AsyncClient(address) as client:
            await client.generate([0], max_tokens=1, temperature=0, ignore_eos=True)
            answered = time.monotonic()
            while leaves_all and (await client.server_info()).buckets_pending:
                await asyncio.sleep(0.1)
    return {"ready": round(ready - began, 4), "first token": round(answered - ready, 4)}
