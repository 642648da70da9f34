"""A stream that is left early frees its request on the server, at once and however it is left."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from jaxserve.client import AsyncClient, AsyncStream, CallError, Client, Delta, Stream
from tests.jaxserve.server.harness import Running, running, until

LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
STEP = 0.02  # seconds


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Turn the collector of cycles off: what is dropped has to be freed without it."""
    gc.disable()
    yield
    gc.enable()


@asynccontextmanager
async def freeing(folder: Path) -> AsyncIterator[Running]:
    """A server on which no request may run to its end."""
    async with running(folder, seconds=STEP) as server:
        yield server
        await server.at_rest()
        launches = server.runner.launches.values()
        assert max(launches, default=0) < LONG["max_tokens"], "a request was not ended early"


def leave_by_break(stream: Stream) -> None:
    for event in stream:
        if isinstance(event, Delta):
            break


def leave_by_exception(stream: Stream) -> None:
    with suppress(KeyError):
        for event in stream:
            if isinstance(event, Delta):
                raise KeyError


def leave_by_close(stream: Stream) -> None:
    next(stream)
    stream.close()
    assert list(stream) == []


def leave_with(stream: Stream) -> None:
    with stream:
        next(stream)


def leave_unread(stream: Stream) -> None:
    time.sleep(3 * STEP)


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_exception, leave_by_close, leave_with, leave_unread]
)
def test_sync(tmp_path: Path, leave: Callable[[Stream], None]) -> None:
    async def main() -> None:
        async with freeing(tmp_path) as server:
            with Client(server.address) as client:
                await asyncio.to_thread(lambda: leave(client.stream("hello", **LONG)))
                await server.at_rest()

    asyncio.run(main())


async def async_by_break(stream: AsyncStream) -> None:
    async for event in stream:
        if isinstance(event, Delta):
            break


async def async_by_exception(stream: AsyncStream) -> None:
    with suppress(KeyError):
        async for event in stream:
            if isinstance(event, Delta):
                raise KeyError


async def async_by_close(stream: AsyncStream) -> None:
    await anext(stream)
    await stream.close()
    assert [event async for event in stream] == []


async def async_with(stream: AsyncStream) -> None:
    async with stream:
        await anext(stream)


async def async_unread(stream: AsyncStream) -> None:
    await asyncio.sleep(3 * STEP)


async def async_cancelled(stream: AsyncStream) -> None:
    heard: list[Any] = []
    task = asyncio.create_task(hear(stream, heard.append))
    await until(lambda: heard)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "leave",
    [async_by_break, async_by_exception, async_by_close, async_with, async_unread, async_cancelled],
)
def test_async(tmp_path: Path, leave: Callable[[AsyncStream], Any]) -> None:
    async def main() -> None:
        async with freeing(tmp_path) as server, AsyncClient(server.address) as client:
            await leave(client.stream("hello", **LONG))
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.system
def test_conversations(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hello"}]

    async def main() -> None:
        async with freeing(tmp_path) as server, AsyncClient(server.address) as client:
            await async_by_break(client.chat_stream(talk, **LONG))
            await server.at_rest()
            with Client(server.address) as waiting:
                await asyncio.to_thread(lambda: leave_by_break(waiting.chat_stream(talk, **LONG)))
                await server.at_rest()

    asyncio.run(main())


def test_a_cancelled_unary_call_is_freed(tmp_path: Path) -> None:
    async def main() -> None:
        async with freeing(tmp_path) as server, AsyncClient(server.address) as client:
            call = asyncio.create_task(client.generate("hello", **LONG))
            await until(lambda: server.runner.steps > 5)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.at_rest()

    asyncio.run(main())


def test_closed_by_somebody_else_a_stream_just_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with freeing(tmp_path) as server, AsyncClient(server.address) as client:
            with Client(server.address) as waiting:
                streams = client.stream("hello", **LONG), waiting.stream("hello", **LONG)
                heard: tuple[list[Any], list[Any]] = [], []
                readers = asyncio.gather(
                    hear(streams[0], heard[0].append),
                    asyncio.to_thread(hear_waiting, streams[1], heard[1].append),
                )
                await until(lambda: all(heard))
                await streams[0].close()
                streams[1].close()
                await readers
                assert all(len(events) < 400 for events in heard)

    asyncio.run(main())


def test_closed_clients_end_their_calls(tmp_path: Path) -> None:
    async def main() -> None:
        async with freeing(tmp_path) as server:
            client = AsyncClient(server.address)
            waiting = Client(server.address)
            calls = [
                asyncio.create_task(call)
                for call in (
                    client.generate("hello", **LONG),
                    collect(client.stream("hello", **LONG)),
                    asyncio.to_thread(waiting.generate, "hello", **LONG),
                    asyncio.to_thread(list, waiting.stream("hello", **LONG)),
                )
            ]
            await until(lambda: server.service.in_flight == len(calls))
            await client.close()
            waiting.close()
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert [(type(error), getattr(error, "code", None)) for error in errors] == [
                (CallError, "CANCELLED")
            ] * 4

    asyncio.run(main())


async def hear(stream: AsyncStream, tell: Callable[[Any], None]) -> None:
    async for event in stream:
        tell(event)


def hear_waiting(stream: Stream, tell: Callable[[Any], None]) -> None:
    for event in stream:
        tell(event)


async def collect(stream: AsyncStream) -> list[Any]:
    return [event async for event in stream]


def test_a_late_reader_gets_everything(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as server, AsyncClient(server.address) as client:
            stream = client.stream("hello", temperature=0, max_tokens=50, ignore_eos=True)
            await until(lambda: server.runner.steps >= 50)
            events = [event async for event in stream]
            assert sum(len(event.token_ids) for event in events if isinstance(event, Delta)) == 50

    asyncio.run(main())
