"""Floods of HTTP/2 frames: requests of other connections go on as if alone.

What the server itself is made to hold by rapid resets is not measured: client and server are one
process, and its allocator keeps some megabytes for the next calls.
"""

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from jaxserve.server.core.limits import Limits
from jaxserve.v1 import common_pb2, inference_pb2
from tests.jaxserve.server.grpc.frames import (
    CANCEL,
    CONTINUATION,
    DATA,
    HEADERS,
    PING,
    PRIORITY,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    connected,
    frame,
    headers_of,
    literal,
    message,
    opened,
)
from tests.jaxserve.server.grpc.undisturbed import undisturbed
from tests.jaxserve.server.harness import Running, running

TOKENIZE = "/jaxserve.v1.InferenceService/Tokenize"
STREAM = "/jaxserve.v1.InferenceService/GenerateStream"
MANY = 10_000  # frames of a few bytes
RESETS = 2000
LATER = 100
MEBI = 1024  # KiB, the unit of ru_maxrss
Flood = Callable[[], Iterator[bytes]]  # yields what one connection sends


def pings() -> Iterator[bytes]:
    return many(frame(PING, 0, 0, b"a flood!"))


def settings() -> Iterator[bytes]:
    return many(frame(SETTINGS, 0, 0))


def window_updates() -> Iterator[bytes]:
    return many(frame(WINDOW_UPDATE, 0, 0, (1).to_bytes(4)))


def empty_data() -> Iterator[bytes]:
    yield opened(1, TOKENIZE)
    yield from many(frame(DATA, 0, 1))


def priorities() -> Iterator[bytes]:
    """Each names another stream, none of which is ever opened."""
    for first in range(0, MANY, 1000):
        streams = range(2 * first + 1, 2 * first + 2001, 2)
        yield b"".join(frame(PRIORITY, 0, stream, b"\x00\x00\x00\x00\x10") for stream in streams)


def resets() -> Iterator[bytes]:
    for stream in streams_of(RESETS):
        yield opened(stream, TOKENIZE) + frame(RST_STREAM, 0, stream, CANCEL)


def resets_of_requests() -> Iterator[bytes]:
    """Each request is reset LATER streams after it, when it has got to the service or is about to.

    gRPC drops what is reset at once, and no service hears of it.
    """
    sampling = common_pb2.SamplingParams(max_tokens=400, seed=1, ignore_eos=True)
    request = inference_pb2.GenerateStreamRequest(text="x", sampling=sampling)
    data = request.SerializeToString()
    streams = streams_of(RESETS)
    for number, stream in enumerate(streams):
        yield opened(stream, STREAM) + message(stream, data)
        if number >= LATER:
            yield frame(RST_STREAM, 0, streams[number - LATER], CANCEL)
    for stream in streams[-LATER:]:
        yield frame(RST_STREAM, 0, stream, CANCEL)


def headers_without_end() -> Iterator[bytes]:
    """Send 80 MB of headers, more than the server may take in memory."""
    yield frame(HEADERS, 0, 1, headers_of(TOKENIZE))
    for _ in range(5000):
        yield frame(CONTINUATION, 0, 1, literal(b"x-more", b"y" * 16_000))


def many(data: bytes) -> Iterator[bytes]:
    for _ in range(0, MANY, 1000):
        yield data * 1000


def streams_of(count: int) -> range:
    """Return the numbers of a client's first streams."""
    return range(1, 2 * count, 2)


IN_FRAMES = (pings, settings, window_updates, empty_data, priorities, headers_without_end)
OF_CALLS = (resets, resets_of_requests)


@asynccontextmanager
async def flooding(server: Running, flood: Flood) -> AsyncIterator[None]:
    """Send a flood while the block runs, on one connection after the other; at least once."""
    enough = asyncio.Event()

    async def send() -> None:
        while True:
            await send_once(server, flood)
            if enough.is_set():
                return

    task = asyncio.create_task(send())
    try:
        yield
    finally:
        enough.set()
        await task


async def send_once(server: Running, flood: Flood) -> None:
    """Send a flood on a connection of its own, until the server has read it or hangs up."""
    async with connected(server) as connection:
        with suppress(ConnectionError):
            for part in flood():
                await connection.send(part)
        await connection.settle()


@pytest.mark.parametrize("flood", IN_FRAMES + OF_CALLS, ids=lambda flood: flood.__name__)
def test_others_do_not_feel_a_flood(tmp_path: Path, flood: Flood) -> None:
    async def main() -> None:
        limits = Limits(slow_client_seconds=600)
        async with (
            running(tmp_path, limits=limits, seconds=0.002, prefix_cache=False) as server,
            undisturbed(server) as check,
        ):
            memory = peak()
            async with flooding(server, flood):
                for _ in range(2):
                    await check()
            assert flood in OF_CALLS or peak() - memory < 50 * MEBI

    asyncio.run(main())


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_calls_that_never_send_their_message(tmp_path: Path) -> None:
    """Those beyond the bound are refused; the others wait, and hold no request."""
    limits = Limits(max_streams_per_connection=1024, slow_client_seconds=600.0)

    async def main() -> None:
        async with (
            running(tmp_path, limits=limits, seconds=0.002, prefix_cache=False) as server,
            undisturbed(server) as check,
            connected(server) as connection,
        ):
            for stream in streams_of(1100):
                await connection.send(opened(stream, TOKENIZE))
            await connection.settle()
            refused = [each for each in connection.frames() if each.kind == RST_STREAM]
            assert [each.payload for each in refused] == [REFUSED_STREAM] * 76
            assert not connection.hung_up and not server.service.in_flight
            await check()

    asyncio.run(main())
