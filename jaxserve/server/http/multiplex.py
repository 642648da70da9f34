"""Several answers as one, for as long as the client is there."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request

from jaxserve.server.core.answer import Answer
from jaxserve.server.core.answer_events import AnswerEvent, Done

Arrived = tuple[int, AnswerEvent | Exception]


async def together(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, AnswerEvent]]:
    """The answers' news as they come, each with its answer's position; the first error ends it."""
    if len(answers) == 1:
        async for news in answers[0]:
            yield 0, news
        return
    arrived: asyncio.Queue[Arrived] = asyncio.Queue(
        1
    )  # a slow reader is felt in the answers' own boxes
    tasks = [asyncio.create_task(_forward(i, answer, arrived)) for i, answer in enumerate(answers)]
    going = len(answers)
    try:
        while going:
            i, news = await arrived.get()
            if isinstance(news, Exception):
                raise news
            going -= isinstance(news, Done)
            yield i, news
    finally:
        await _end(tasks)


async def _forward(i: int, answer: Answer, arrived: asyncio.Queue[Arrived]) -> None:
    try:
        async for news in answer:
            await arrived.put((i, news))
    except Exception as error:
        await arrived.put((i, error))


async def while_connected[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; ClientDisconnect, and the work is cancelled, when the client goes away
    before.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await _end([task, gone])


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
