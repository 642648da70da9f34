"""Send replies: merge several answers, and notice a disconnect."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxserve.server.core.answer import Answer
from jaxserve.server.core.answer_events import AnswerEvent, Done, Update

HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the events otherwise
}
ROW_SECONDS = 10.0  # until the status line of a stream is sent, whether or not it has begun
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
KEEP_ALIVE_SECONDS = 15.0  # between comments in a stream that tells nothing

Item = tuple[int, AnswerEvent]  # position of an answer among the request's, and its event
Merged = tuple[int, AnswerEvent | Exception]


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[Item]:
    """Yield the answers' events as they come, each with its answer's position.

    The first error is raised and ends all of them.
    """
    if len(answers) == 1:
        async for event in answers[0]:
            yield 0, event
        return
    # One place only: a slow reader shall fill the answers' own outboxes, which have a limit.
    queue: asyncio.Queue[Merged] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_forward(i, answer, queue)) for i, answer in enumerate(answers)]
    unfinished = len(answers)
    try:
        while unfinished:
            i, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Done):
                unfinished -= 1
            yield i, event
    finally:
        await cancel(tasks)


async def _forward(i: int, answer: Answer, queue: asyncio.Queue[Merged]) -> None:
    try:
        async for event in answer:
            await queue.put((i, event))
    except Exception as error:
        await queue.put((i, error))


async def while_connected[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; cancel it and raise ClientDisconnect if the client goes away."""
    # It runs at once, until it waits for something: most refusals are made without.
    task = asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
    if task.done():
        return task.result()
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await cancel([task, gone])


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def cancel(tasks: "Sequence[asyncio.Future[Any]]") -> None:
    """Cancel what still runs, and wait until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_begun(first: "asyncio.Future[Any]", answers: Sequence[Answer]) -> None:
    """Wait until a request has its row, its first event has come, or ROW_SECONDS have passed."""
    rows = [asyncio.create_task(answer.begun.wait()) for answer in answers]
    try:
        await asyncio.wait((first, *rows), timeout=ROW_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(rows)


async def with_keep_alive(
    first: "asyncio.Future[Item]", rest: AsyncGenerator[Item]
) -> AsyncGenerator[Item | None]:
    """Yield the events of a stream, and None after each KEEP_ALIVE_SECONDS without a token.

    Args:
        first: The first event, which may be still to come.
        rest: The events behind it.
    """
    pending = first
    try:
        while True:
            done, _ = await asyncio.wait((pending,), timeout=KEEP_ALIVE_SECONDS)
            if not done:
                yield None
                continue
            item = pending.result()
            yield item
            if isinstance(item[1], Update | Done):
                break
            pending = asyncio.ensure_future(anext(rest))
    finally:
        await cancel([pending])
    async for item in rest:
        yield item


async def without_silence(frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield what a stream sends, and a comment where nothing was sent for KEEP_ALIVE_SECONDS.

    Args:
        frames: Bytes for each event of the answer; none for one that tells nothing, such as a part
            of a call that is told when it is whole.
    """
    sent = time.monotonic()
    async with aclosing(frames):
        async for frame in frames:
            now = time.monotonic()
            if not frame and now - sent < KEEP_ALIVE_SECONDS:
                continue
            sent = now
            yield frame or KEEP_ALIVE


class EventStream(StreamingResponse):
    """A response of server-sent events that closes what it owns, however it ends.

    `owned` has the answers behind the events. A connection whose client reads too slowly ends, and
    the stream with it: unread events would pile up, since the engine does not wait for a reader.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        owned: AsyncExitStack,
        headers: Mapping[str, str],
    ):
        super().__init__(events, headers={**HEADERS, **headers})
        self._events = events
        self._owned = owned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._owned, aclosing(self._events):
            await super().__call__(scope, receive, send)
