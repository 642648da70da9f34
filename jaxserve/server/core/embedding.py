"""Several inputs as one request: each is an answer of its own, and they are told together."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from jaxserve.completion import Completion
from jaxserve.errors import AbortedError, DeadlineError, QueueFullError
from jaxserve.prompts import Prompt
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.service import Service

MAX_INPUTS = 2048  # of a request, as OpenAI has it
AT_ONCE = 128  # of a request's inputs in the engine: others come in between
FEW = 4  # embeddings that are written on the event loop


def embedding_requests(
    inputs: Sequence[tuple[Prompt, str]], request_id: str, **given: Any
) -> list[IncomingRequest]:
    """One for each input, which is a prompt and its path in the client's message. given: more
    fields of Call.
    """
    ids = [request_id] if len(inputs) == 1 else [f"{request_id}-{i}" for i in range(len(inputs))]
    return [
        IncomingRequest(prompt=prompt, prompt_field=path, embed=True, request_id=id, **given)
        for (prompt, path), id in zip(inputs, ids, strict=True)
    ]


async def embed(service: Service, calls: Sequence[IncomingRequest]) -> list[Completion]:
    """In the order of the calls. The first error ends them all; so does whoever cancels this."""
    running, tasks = _Running(), list[asyncio.Task[Completion]]()
    try:
        with ExitStack() as answers:
            async with (
                asyncio.timeout(service.limits.max_request_seconds),
                asyncio.TaskGroup() as group,
            ):
                for call in calls:
                    answer = answers.enter_context(await _admit(service, call, running))
                    tasks.append(running.add(group.create_task(_embedded(answer))))
        return [task.result() for task in tasks]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    except TimeoutError:
        raise DeadlineError("--max-request-seconds has passed") from None


async def render_each[T](
    service: Service, done: Sequence[Completion], write: Callable[[int, Completion], T]
) -> list[T]:
    """What `write` makes of each, by its place: beside the event loop, where there are many."""

    def work() -> list[T]:
        return [write(i, completion) for i, completion in enumerate(done)]

    return work() if len(done) <= FEW else await service.run_in_background(partial(work))


async def _admit(service: Service, call: IncomingRequest, running: "_Running") -> Answer:
    """A full queue is no reason to refuse what waits in it itself: it becomes shorter."""
    await asyncio.sleep(0)  # whoever else is due on the event loop
    while running.count >= AT_ONCE:
        await running.one_less()
    while running.count:
        try:
            return await service.answer(call, retries_itself=True)
        except QueueFullError:
            await running.one_less()
    return await service.answer(call)


async def _embedded(answer: Answer) -> Completion:
    (completion,) = (await answer.whole()).completions
    if completion.finish_reason == "abort":
        raise AbortedError(f"request {answer.id!r} was aborted before it was embedded")
    return completion


class _Running:
    """Those of a request's inputs that are in the engine."""

    def __init__(self) -> None:
        self.count = 0
        self._ended = asyncio.Event()

    def add[T](self, task: "asyncio.Task[T]") -> "asyncio.Task[T]":
        self.count += 1
        task.add_done_callback(self._end)
        return task

    def _end(self, task: "asyncio.Task[Any]") -> None:
        self.count -= 1
        self._ended.set()

    async def one_less(self) -> None:
        """Until one of them has ended, if there is one."""
        if self.count:
            self._ended.clear()
            await self._ended.wait()
