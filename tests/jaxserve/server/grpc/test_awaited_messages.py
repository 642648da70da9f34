"""Calls without a token whose message does not come: few are awaited, and none for ever."""

import asyncio
from pathlib import Path

import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.messages import MAX_AWAITED
from jaxserve.server.security.auth import BearerTokens
from tests.jaxserve.server.grpc.frames import (
    DATA,
    END_STREAM,
    HEADERS,
    RawConnection,
    connected,
    frame,
    opened,
)
from tests.jaxserve.server.grpc.undisturbed import undisturbed
from tests.jaxserve.server.harness import Running, running, until

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
LARGE = 15 * 2**20  # bytes that a message says it has
REFUSED = b"grpc-status\x018"  # RESOURCE_EXHAUSTED
SERVING = health_pb2.HealthCheckResponse.SERVING
TOKENS = BearerTokens(("secret",))


def half_sent(stream: int, method: str) -> bytes:
    """Return a call, and the beginning of a message that has no end."""
    prefix = b"\x00" + LARGE.to_bytes(4)
    return opened(stream, method) + frame(DATA, 0, stream, prefix + bytes(1000))


def ended(connection: RawConnection) -> set[int]:
    """Return the streams whose calls have a status."""
    return {
        found.stream
        for found in connection.frames()
        if found.kind == HEADERS and found.flags & END_STREAM
    }


async def health(server: Running) -> Message:
    return await HealthStub(server.channel).Check(health_pb2.HealthCheckRequest())


@pytest.mark.parametrize("method", [CHECK, WATCH])
def test_further_calls_end_those_that_wait_longest(tmp_path: Path, method: str) -> None:
    more = 10

    async def main() -> None:
        async with (
            running(tmp_path, tokens=TOKENS) as server,
            undisturbed(server, "secret"),
            connected(server) as connection,
        ):
            for number in range(MAX_AWAITED + more):
                await connection.send(half_sent(2 * number + 1, method))
            await until(lambda: len(ended(connection)) >= more)
            assert b"made room for others" in connection.received
            assert ended(connection) == {2 * number + 1 for number in range(more)}
            assert (await health(server)).status == SERVING
            await until(lambda: ended(connection) == {2 * n + 1 for n in range(more + 1)})

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize("sent", [opened(1, CHECK), half_sent(1, CHECK)], ids=["nothing", "half"])
def test_a_message_that_does_not_come_in_time(tmp_path: Path, sent: bytes) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, tokens=TOKENS, limits=Limits(slow_client_seconds=0.2)) as server,
            undisturbed(server, "secret"),
            connected(server) as connection,
        ):
            await connection.send(sent)
            await until(lambda: REFUSED in connection.received)
            assert b"within 0.2 s (--slow-client-seconds)" in connection.received

    asyncio.run(main())


def test_a_call_without_a_message(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, tokens=TOKENS) as server,
            undisturbed(server, "secret"),
            connected(server) as connection,
        ):
            await connection.send(opened(1, CHECK) + frame(DATA, END_STREAM, 1))
            await until(lambda: b"the call has no message" in connection.received)

    asyncio.run(main())
