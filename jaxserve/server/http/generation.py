"""Serve POST /v1/completions and /v1/chat/completions."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server.core.answer import Answer
from jaxserve.server.core.answer_events import Done
from jaxserve.server.core.incoming_request import IncomingRequest, new_id, trace_of
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import Service
from jaxserve.server.http.body import read_with_timeout
from jaxserve.server.http.calls import (
    body_field_names,
    chat_calls,
    check_model,
    completion_calls,
    scores_only,
)
from jaxserve.server.http.chat_replies import ChatWriter
from jaxserve.server.http.completion_replies import CompletionWriter
from jaxserve.server.http.errors import errors_to_responses
from jaxserve.server.http.ignored import note_also
from jaxserve.server.http.json import MEDIA_TYPE, dumps
from jaxserve.server.http.replies import Chunks, UsageMeter, Writer, envelope, id_header
from jaxserve.server.http.streams import (
    EventStream,
    cancel,
    merged,
    until_begun,
    while_connected,
    with_keep_alive,
    without_silence,
)
from jaxserve.server.http.thinking_fields import unread_names
from jaxserve.server.http.types import ChatBody, CompletionBody, Sampling, StreamOptions
from jaxserve.server.readiness import Readiness
from jaxserve.server.serving_state import ServingState


class Generation:
    """Endpoints that generate text."""

    def __init__(self, readiness: Readiness, limits: Limits):
        self._readiness = readiness
        self._limits = limits

    @errors_to_responses
    async def completions(self, request: Request) -> Response:
        body, timeout, state = await self._body(request, CompletionBody)
        id = body.request_id or new_id()
        calls = completion_calls(body, id, timeout, state.defaults)
        return await self._reply(request, body, id, calls)

    @errors_to_responses
    async def chat(self, request: Request) -> Response:
        body, timeout, state = await self._body(request, ChatBody)
        id = body.request_id or new_id()
        calls = chat_calls(body, id, timeout, self._limits, state.defaults)
        return await self._reply(request, body, id, calls)

    async def _body[T: Sampling](
        self, request: Request, kind: type[T]
    ) -> tuple[T, float | None, ServingState]:
        # A server that takes no requests refuses before it reads the body.
        state = self._readiness.require_serving()
        return *await read_with_timeout(request, kind, self._limits), state

    async def _reply(
        self, request: Request, body: Sampling, id: str, calls: list[IncomingRequest]
    ) -> Response:
        # Asked again, since the server may have ended while the body was read.
        served = self._readiness.require_serving()
        check_model(body.model, served)
        client = request.state.client
        trace = trace_of(request.headers.items())
        calls = [replace(call, client=client, trace=trace) for call in calls]
        async with AsyncExitStack() as stack:
            work = _stream if body.stream else _whole
            return await while_connected(request, work(request, served, body, id, calls, stack))


async def _whole(
    request: Request,
    served: ServingState,
    body: Sampling,
    id: str,
    calls: list[IncomingRequest],
    stack: AsyncExitStack,
) -> Response:
    answers = await _admit(served.service, body, calls, stack)
    note_also(request, unread_names(body, answers[0].prepared.unread))
    meter = _meter(body, answers)
    dones: dict[int, Done] = {}
    async for prompt, event in await stack.enter_async_context(aclosing(merged(answers))):
        meter.count(prompt, event)
        if isinstance(event, Done):
            dones[prompt] = event
    writer = _writer(served, body, answers)
    head = envelope(writer.whole_object, writer, id, served.model.name)

    def render() -> bytes:
        in_order = [dones[i] for i in range(len(answers))]
        return dumps({**head, **writer.whole(in_order), "usage": meter.total()})

    # Log-probabilities may be a hundred thousand numbers: rendering them on the event loop would
    # delay every other request.
    params = answers[0].prepared.request.params
    if params.logprobs is not None or params.prompt_logprobs is not None:
        content = await served.service.run_in_background(partial(render))
    else:
        content = render()
    return Response(content, headers=id_header(id), media_type=MEDIA_TYPE)


async def _stream(
    request: Request,
    served: ServingState,
    body: Sampling,
    id: str,
    calls: list[IncomingRequest],
    stack: AsyncExitStack,
) -> Response:
    answers = await _admit(served.service, body, calls, stack)
    note_also(request, unread_names(body, answers[0].prepared.unread))
    events = await stack.enter_async_context(aclosing(merged(answers)))
    first = asyncio.ensure_future(anext(events))
    stack.push_async_callback(cancel, [first])
    # An error before the response begins still sets its status.
    await until_begun(first, answers)
    if first.done():
        first.result()
    writer = _writer(served, body, answers)
    head = envelope(writer.chunk_object, writer, id, served.model.name)
    meter = _meter(body, answers)
    chunks = Chunks(head, writer, meter, body.stream_options or StreamOptions())
    stream = without_silence(chunks.events(with_keep_alive(first, events)))
    # From here on the stream owns the answers: the stack must not end them when this returns.
    return EventStream(stream, stack.pop_all(), id_header(id))


async def _admit(
    service: Service, body: Sampling, calls: list[IncomingRequest], stack: AsyncExitStack
) -> list[Answer]:
    """Admit all calls or raise; admitted answers end with the stack."""
    answers = list[Answer]()
    with body_field_names(body):
        for call in calls:
            if answers:
                await asyncio.sleep(0)  # let other tasks of the event loop run between two prompts
            answers.append(stack.enter_context(await service.answer(call)))
    return answers


def _meter(body: Sampling, answers: Sequence[Answer]) -> UsageMeter:
    return UsageMeter(body.n, answers, counts_output=not scores_only(body))


def _writer(served: ServingState, body: Sampling, answers: Sequence[Answer]) -> Writer:
    tokenizer = served.service.prompts.tokenizer
    eos_ids = served.model.eos_ids
    if isinstance(body, ChatBody):
        return ChatWriter(body, answers[0].prepared.reading, tokenizer, eos_ids)
    assert isinstance(body, CompletionBody)
    prompts = [answer.prepared.request.prompt for answer in answers]
    return CompletionWriter(body, prompts, tokenizer, eos_ids)
