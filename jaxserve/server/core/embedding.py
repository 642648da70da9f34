"""Embedding of several inputs in one request: each input is an answer of its own."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from jaxserve.completion import Completion
from jaxserve.errors import AbortedError, DeadlineError, QueueFullError
from jaxserve.prompts import Prompt
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.service import Service

MAX_INPUTS = 2048  # of a request, as in OpenAI's API
AT_ONCE = 128  # inputs of one request in the engine, so that other requests come in between
FEW = 4  # embeddings that are rendered on the event loop itself


def embedding_requests(
    inputs: Sequence[tuple[Prompt, str]], request_id: str, **fields: Any
) -> list[IncomingRequest]:
    """Make a request for each input, which is a prompt and its path in the client's message.

    Args:
        **fields: Further fields of every IncomingRequest.
    """
    ids = [request_id] if len(inputs) == 1 else [f"{request_id}-{i}" for i in range(len(inputs))]
    return [
        IncomingRequest(prompt=prompt, prompt_field=path, embed=True, request_id=id, **fields)
        for (prompt, path), id in zip(inputs, ids, strict=True)
    ]


async def embed(service: Service, requests: Sequence[IncomingRequest]) -> list[Completion]:
    """Run all requests and return their completions in order.

    The first error, or cancellation of this coroutine, ends all of them.
    """
    running = _Running()
    tasks: list[asyncio.Task[Completion]] = []
    try:
        with ExitStack() as answers:
            async with (
                asyncio.timeout(service.limits.max_request_seconds),
                asyncio.TaskGroup() as group,
            ):
                for request in requests:
                    answer = answers.enter_context(await _admit(service, request, running))
                    task = group.create_task(_embedded(service, request, answer, running))
                    tasks.append(running.add(task))
        return [task.result() for task in tasks]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    except TimeoutError:
        raise DeadlineError("--max-request-seconds has passed") from None


async def render_each[T](
    service: Service, completions: Sequence[Completion], render: Callable[[int, Completion], T]
) -> list[T]:
    """Render each completion, given with its place; many are rendered beside the event loop."""

    def render_all() -> list[T]:
        return [render(i, completion) for i, completion in enumerate(completions)]

    if len(completions) <= FEW:
        return render_all()
    return await service.run_in_background(partial(render_all))


async def _admit(service: Service, request: IncomingRequest, running: "_Running") -> Answer:
    """Admit an input once fewer than AT_ONCE of its request are in the engine.

    The queue may be full of this request's own inputs: these end by themselves, and then there is
    room. Without any of them running, a full queue is an error as for any request.
    """
    await asyncio.sleep(0)  # let other tasks of the event loop run between two inputs
    while running.count >= AT_ONCE:
        await running.wait_for_end()
    while running.count:
        try:
            return await service.answer(request, retries_itself=True)
        except QueueFullError:
            await running.wait_for_end()
    return await service.answer(request)


async def _embedded(
    service: Service, request: IncomingRequest, answer: Answer, running: "_Running"
) -> Completion:
    """Return an input's embedding; an input that left a full queue for others enters it again."""
    while True:
        with answer:
            try:
                (completion,) = (await answer.whole()).completions
                break
            except QueueFullError:
                pass
        with running.aside():
            answer = await _admit(service, request, running)
    if completion.finish_reason == "abort":
        raise AbortedError(f"request {answer.id!r} was aborted before it was embedded")
    return completion


class _Running:
    """The inputs of one request that are in the engine."""

    def __init__(self) -> None:
        self.count = 0
        self._ended = asyncio.Event()

    def add[T](self, task: "asyncio.Task[T]") -> "asyncio.Task[T]":
        self.count += 1
        task.add_done_callback(lambda _: self._end())
        return task

    def _end(self) -> None:
        self.count -= 1
        self._ended.set()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Count an input as ended while it is not in the engine."""
        self._end()
        try:
            yield
        finally:
            self.count += 1

    async def wait_for_end(self) -> None:
        """Wait until an input has ended; return at once when none runs."""
        if self.count:
            self._ended.clear()
            await self._ended.wait()
