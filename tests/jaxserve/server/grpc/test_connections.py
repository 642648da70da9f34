"""Bounds on the connections of gRPC, and on the metadata of their calls."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from jaxserve.server.core.limits import Limits
from jaxserve.v1 import inference_pb2
from tests.jaxserve.server.grpc.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PREFACE,
    SETTINGS,
    connected,
    frame,
    headers_of,
    message,
    opened,
)
from tests.jaxserve.server.grpc.undisturbed import undisturbed
from tests.jaxserve.server.harness import Running, running

TOKENIZE = "/jaxserve.v1.InferenceService/Tokenize"
REQUEST = inference_pb2.TokenizeRequest(text="x")


def test_metadata_of_a_client_that_acknowledges_no_settings(tmp_path: Path) -> None:
    """Its metadata is refused by the server, or now and then by gRPC itself, with one status.

    gRPC's own limit holds from the acknowledgement on. Before, it refuses at random what is over.
    """

    async def main() -> None:
        async with running(tmp_path) as server, undisturbed(server) as check:
            host, port = server.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            block = headers_of(TOKENIZE, *[(b"x-%d" % i, b"y" * 10_000) for i in range(10)])
            parts = [block[i : i + 16384] for i in range(0, len(block), 16384)]
            sent = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 0, 1, parts[0])
            sent += b"".join(frame(CONTINUATION, 0, 1, part) for part in parts[1:-1])
            sent += frame(CONTINUATION, END_HEADERS, 1, parts[-1])
            writer.write(sent + message(1, b""))
            found = b""
            while b"grpc-status\x018" not in found:  # RESOURCE_EXHAUSTED
                part = await reader.read(2**16)
                assert part, found
                found += part
            await check()
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("limit", [16 * 1024, 64 * 1024])
def test_metadata_of_other_clients(tmp_path: Path, limit: int) -> None:
    """The limit is the flag's, and not gRPC's own of 16 KiB; the next call is answered."""

    async def main() -> None:
        async with (
            running(tmp_path, limits=Limits(max_header_bytes=limit)) as server,
            undisturbed(server) as check,
        ):
            for size, status in ((limit - 1000, "OK"), (limit + 1000, "RESOURCE_EXHAUSTED")) * 2:
                call = server.inference.Tokenize(REQUEST, metadata=[("x-more", "y" * size)])
                assert (await call.code()).name == status, size
                assert await server.inference.Tokenize(REQUEST)
            await check()

    asyncio.run(main())


def test_more_connections_than_the_server_takes(tmp_path: Path) -> None:
    """The place of a connection that is closed is free for another."""

    async def main() -> None:
        limits = Limits(max_grpc_connections=3)
        async with (
            running(tmp_path, limits=limits) as server,
            undisturbed(server) as check,
            contextlib.AsyncExitStack() as stack,
        ):
            host, port = server.address.split(":")

            async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                reader, writer = await asyncio.open_connection(host, int(port))
                stack.callback(writer.close)
                writer.write(PREFACE + frame(SETTINGS, 0, 0))
                return reader, writer

            others = [await connect() for _ in range(2)]
            for reader, _ in others:
                assert await reader.readexactly(9)  # SETTINGS
            for _ in range(3):
                with contextlib.suppress(ConnectionError):
                    assert await (await connect())[0].read() == b""
            await check()
            others[0][1].close()
            assert DATA in await kinds_of_an_answer(server)
            await check()

    asyncio.run(main())


async def kinds_of_an_answer(server: Running) -> set[int]:
    """Call on a connection of its own, as soon as there is room; return what frames come back."""
    while True:
        async with connected(server) as connection:
            with contextlib.suppress(ConnectionError):
                data = REQUEST.SerializeToString()
                await connection.send(opened(1, TOKENIZE) + message(1, data))
            await connection.settle()
            while connection.received and not connection.hung_up:
                kinds = {each.kind for each in connection.frames() if each.stream}
                if DATA in kinds:
                    return kinds
                await asyncio.sleep(0.002)


def test_a_thousand_connections_come_and_go(tmp_path: Path) -> None:
    """Half of them say something."""

    async def main() -> None:
        async with (
            running(tmp_path, seconds=0.002, prefix_cache=False) as server,
            undisturbed(server) as check,
        ):
            going = asyncio.create_task(come_and_go(server, batches=10, size=100))
            while not going.done():
                await check()
            await going

    asyncio.run(main())


async def come_and_go(server: Running, batches: int, size: int) -> None:
    """Connect, and close at once what says nothing, and the others when they are greeted."""
    host, port = server.address.split(":")
    for _ in range(batches):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(size // 2):
                _, silent = await asyncio.open_connection(host, int(port))
                silent.close()
            greeted = [await stack.enter_async_context(connected(server)) for _ in range(size // 2)]
            await asyncio.gather(*(connection.settle() for connection in greeted))
            assert not any(connection.hung_up for connection in greeted)
