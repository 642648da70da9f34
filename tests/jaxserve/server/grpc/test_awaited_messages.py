"""Messages that do not come, and whole answers that are not read: both have their time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from jaxserve.errors import QueueFullError
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.awaited_messages import MAX_AWAITED, AwaitedMessages
from jaxserve.server.grpc.errors import SlowSenderError
from jaxserve.server.security.auth import BearerTokens
from jaxserve.v1 import inference_pb2
from tests.jaxserve.server.grpc.frames import (
    DATA,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    WINDOW_UPDATE,
    RawConnection,
    connected,
    frame,
    message,
    opened,
    setting,
)
from tests.jaxserve.server.grpc.undisturbed import undisturbed
from tests.jaxserve.server.harness import Running, running, until

TOKENIZE = "/jaxserve.v1.InferenceService/Tokenize"
STREAM = "/jaxserve.v1.InferenceService/GenerateStream"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
LARGE = 15 * 2**20  # bytes that a message says it has
LATE = b"grpc-status\x014"  # DEADLINE_EXCEEDED
SERVING = health_pb2.HealthCheckResponse.SERVING
PATIENT = Limits(slow_client_seconds=600.0)
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
def test_further_calls_end_others_that_wait(tmp_path: Path, method: str) -> None:
    """One for each; gRPC need not hand calls over in the order in which they came."""
    more = 10

    async def main() -> None:
        async with (
            running(tmp_path, tokens=TOKENS, limits=PATIENT) as server,
            undisturbed(server, "secret"),
            connected(server) as connection,
        ):
            for number in range(MAX_AWAITED + more):
                await connection.send(half_sent(2 * number + 1, method))
            await until(lambda: len(ended(connection)) >= more)
            assert b"calls wait for their message already" in connection.received
            assert len(ended(connection)) == more
            assert (await health(server)).status == SERVING
            await until(lambda: len(ended(connection)) == more + 1)

    asyncio.run(main())


def test_the_call_that_has_waited_longest_is_ended() -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def main() -> None:
        awaited = AwaitedMessages(seconds=60, most=2)
        calls = []
        for _ in range(4):
            calls.append(asyncio.create_task(awaited.next_of(never())))
            await asyncio.sleep(0)  # the call begins to wait
        done, waiting = await asyncio.wait(calls[:2], timeout=60)
        assert done == set(calls[:2]) and not waiting
        assert all(isinstance(call.exception(), QueueFullError) for call in calls[:2])
        assert not calls[2].done() and not calls[3].done()
        for call in calls[2:]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize("method", [CHECK, WATCH, TOKENIZE, STREAM])
@pytest.mark.parametrize("sent", [opened, half_sent])
def test_a_message_that_does_not_come_in_time(
    tmp_path: Path, method: str, sent: Callable[[int, str], bytes]
) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, limits=Limits(slow_client_seconds=0.2)) as server,
            undisturbed(server),
            connected(server) as connection,
        ):
            await connection.send(sent(1, method))
            await until(lambda: LATE in connection.received)
            assert b"within 0.2 s (--slow-client-seconds)" in connection.received

    asyncio.run(main())


@pytest.mark.system
def test_a_whole_answer_that_is_not_read_in_time(tmp_path: Path) -> None:
    """Whoever reads on after all finds the reason behind what was on its way."""
    request = inference_pb2.TokenizeRequest(text="x" * 5000)
    wider = [frame(WINDOW_UPDATE, 0, stream, (2**20).to_bytes(4)) for stream in (0, 1)]

    async def main() -> None:
        async with (
            running(tmp_path, limits=Limits(slow_client_seconds=0.2)) as server,
            undisturbed(server),
            connected(server, setting(INITIAL_WINDOW_SIZE, 100)) as connection,
        ):
            sent = opened(1, TOKENIZE) + message(1, request.SerializeToString())
            await connection.send(sent)
            await asyncio.sleep(0.5)
            await connection.send(b"".join(wider))
            await until(lambda: b"grpc-status\x018" in connection.received)  # RESOURCE_EXHAUSTED
            assert b"not read within 0.2 s (--slow-client-seconds)" in connection.received

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


def test_those_that_wait_longest_may_have_timed_out_in_this_moment() -> None:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def at_once() -> AsyncIterator[bytes]:
        yield b"message"

    async def main() -> None:
        awaited = AwaitedMessages(seconds=0.01, most=2)
        waits = [asyncio.create_task(awaited.next_of(nothing())) for _ in range(2)]
        await asyncio.sleep(0)
        time.sleep(0.02)  # the loop stands still until the time is over
        while not any(scope.expired() for scope in awaited._scopes):
            await asyncio.sleep(0)
        assert await awaited.next_of(at_once()) == b"message"
        found = await asyncio.gather(*waits, return_exceptions=True)
        assert {type(error) for error in found} <= {SlowSenderError, QueueFullError}
        assert not awaited._scopes

    asyncio.run(main())
