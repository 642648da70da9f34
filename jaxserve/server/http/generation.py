"""POST /v1/completions and /v1/chat/completions."""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.core.answer import Answer
from jaxserve.server.core.answer_events import Done
from jaxserve.server.core.incoming_request import IncomingRequest, trace_of
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import Service, new_id
from jaxserve.server.http.body import MEDIA_TYPE
from jaxserve.server.http.calls import (
    body_of,
    chat_calls,
    check_model,
    completion_calls,
    naming,
    scores_only,
)
from jaxserve.server.http.chat import ChatWriter
from jaxserve.server.http.completions import CompletionWriter
from jaxserve.server.http.errors import answering
from jaxserve.server.http.ids import id_header
from jaxserve.server.http.json import dumps
from jaxserve.server.http.multiplex import together, while_connected
from jaxserve.server.http.replies import Meter, Writer, envelope
from jaxserve.server.http.stream import Chunks, EventStream
from jaxserve.server.http.types import ChatBody, CompletionBody, Sampling, StreamOptions
from jaxserve.server.readiness import Readiness
from jaxserve.server.serving_state import ServingState


class Generation:
    def __init__(self, readiness: Readiness, limits: Limits):
        self._readiness, self._limits = readiness, limits

    @answering
    async def completions(self, request: Request) -> Response:
        body, timeout = await self._body(request, CompletionBody)
        id = body.request_id or new_id()
        return await self._reply(request, body, id, completion_calls(body, id, timeout))

    @answering
    async def chat(self, request: Request) -> Response:
        body, timeout = await self._body(request, ChatBody)
        id = body.request_id or new_id()
        return await self._reply(request, body, id, chat_calls(body, id, timeout, self._limits))

    async def _body[T: Sampling](self, request: Request, kind: type[T]) -> tuple[T, float | None]:
        self._readiness.require_ready()
        return await body_of(request, kind, self._limits)

    async def _reply(
        self, request: Request, body: Sampling, id: str, calls: list[IncomingRequest]
    ) -> Response:
        served = self._readiness.require_ready()  # the body may have taken its time
        check_model(body.model, served)
        trace = trace_of(request.headers.items())
        calls = [replace(call, trace=trace) for call in calls]
        async with AsyncExitStack() as stack:
            work = _stream if body.stream else _whole
            return await while_connected(request, work(served, body, id, calls, stack))


async def _whole(
    served: ServingState,
    body: Sampling,
    id: str,
    calls: list[IncomingRequest],
    stack: AsyncExitStack,
) -> Response:
    answers = await _admit(served.service, body, calls, stack)
    meter, dones = _meter(body), dict[int, Done]()
    async for prompt, news in await stack.enter_async_context(aclosing(together(answers))):
        meter.see(prompt, news)
        if isinstance(news, Done):
            dones[prompt] = news
    writer = _writer(served, body, answers)
    head = envelope(writer.whole_object, writer, id, int(time.time()), served.model.name)

    def render() -> bytes:
        return dumps(
            {
                **head,
                **writer.whole([dones[i] for i in range(len(answers))]),
                "usage": meter.total(),
            }
        )

    params = answers[0].prepared.request.params
    scored = params.logprobs is not None or params.prompt_logprobs is not None  # many numbers
    content = await served.service.run_in_background(partial(render)) if scored else render()
    return Response(content, headers=id_header(id), media_type=MEDIA_TYPE)


async def _stream(
    served: ServingState,
    body: Sampling,
    id: str,
    calls: list[IncomingRequest],
    stack: AsyncExitStack,
) -> Response:
    """The response begins with the first news: what goes wrong before is an error of its own."""
    answers = await _admit(served.service, body, calls, stack)
    arriving = await stack.enter_async_context(aclosing(together(answers)))
    first = await anext(arriving)
    writer = _writer(served, body, answers)
    head = envelope(writer.chunk_object, writer, id, int(time.time()), served.model.name)
    chunks = Chunks(head, writer, _meter(body), body.stream_options or StreamOptions())
    seconds = served.service.limits.slow_client_seconds
    return EventStream(chunks.events(first, arriving), stack.pop_all(), seconds, id_header(id))


async def _admit(
    service: Service, body: Sampling, calls: list[IncomingRequest], stack: AsyncExitStack
) -> list[Answer]:
    """All of them, or an error; those that were admitted end with the stack."""
    with naming(body):
        return [stack.enter_context(await service.answer(call)) for call in calls]


def _meter(body: Sampling) -> Meter:
    return Meter(body.n, counts_output=not scores_only(body))


def _writer(served: ServingState, body: Sampling, answers: Sequence[Answer]) -> Writer:
    tokenizer, eos_ids = served.service.prompts.tokenizer, served.model.eos_ids
    if isinstance(body, ChatBody):
        return ChatWriter(body, answers[0].prepared.reading, tokenizer, eos_ids)
    assert isinstance(body, CompletionBody)
    return CompletionWriter(
        body, [answer.prepared.request.prompt for answer in answers], tokenizer, eos_ids
    )
