"""jaxserve.v1.InferenceService over grpc.aio."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc.aio import AbortError, InternalError, ServicerContext

from jaxserve.errors import AbortedError, JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.embedding import embed, render_each
from jaxserve.server.core.ignored_names import HEADER, listed, nameable
from jaxserve.server.core.incoming_request import new_id, trace_of
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.server.core.service import Service
from jaxserve.server.core.status import trailers
from jaxserve.server.grpc.fields import check_known
from jaxserve.server.grpc.parse import (
    parse_embed_request,
    parse_request,
    parse_score_request,
    parse_tokenize_input,
    with_message_path,
)
from jaxserve.server.grpc.render import Renderer, StreamEvent, usage_of
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.auth import BearerTokens
from jaxserve.v1 import inference_pb2 as pb
from jaxserve.v1 import inference_pb2_grpc

Method = Callable[[Any, Any, ServicerContext], Awaitable[Any]]


def with_status(method: Method) -> Method:
    """Decorate a method of a servicer: it refuses unknown fields and turns errors into statuses.

    Cancellation passes through.
    """

    @wraps(method)
    async def wrapped(self: Any, request: Message, context: ServicerContext) -> Any:
        try:
            check_known(request)
            return await method(self, request, context)
        except (AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await abort_with(context, with_message_path(mask_internal_error(error)))

    return wrapped


async def abort_with(context: ServicerContext, error: JaxserveError) -> None:
    """End the call with the error's status."""
    await context.abort(grpc.StatusCode[error.code], str(error), trailers(error))


async def write_to(context: ServicerContext, message: Message) -> None:
    """Write a message; CancelledError where the client cancels or hangs up meanwhile."""
    try:
        await context.write(message)
    except InternalError:
        raise asyncio.CancelledError from None


def fields_of_call(context: ServicerContext, tokens: BearerTokens) -> dict[str, Any]:
    """Return the fields of IncomingRequest that come with the call and not in its message."""
    metadata = context.invocation_metadata() or ()
    given = [str(value) for key, value in metadata if key == "authorization"]
    return {
        "client": tokens.client_of(given, context.peer()),
        "timeout": context.time_remaining(),
        "trace": trace_of(metadata),
    }


def tell_ignored(context: ServicerContext, names: Sequence[str]) -> None:
    """Name in the trailing metadata what changed nothing, if anything did."""
    if names:
        context.set_trailing_metadata(((HEADER, listed(nameable(names))),))


def _renderer(answer: Answer, service: Service) -> Renderer:
    return Renderer(answer.id, service.prompts.tokenizer, answer.prepared.reading)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generation, scoring, embedding and tokenizing over gRPC."""

    def __init__(self, readiness: Readiness, tokens: BearerTokens):
        self._readiness = readiness
        self._tokens = tokens

    @with_status
    async def Generate(
        self, request: pb.GenerateRequest, context: ServicerContext
    ) -> pb.GenerateResponse:
        return pb.GenerateResponse(**await self._whole(request, context))

    @with_status
    async def Chat(self, request: pb.ChatRequest, context: ServicerContext) -> pb.ChatResponse:
        return pb.ChatResponse(**await self._whole(request, context))

    @with_status
    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: ServicerContext
    ) -> None:
        await self._stream(request, context, pb.GenerateStreamResponse)

    @with_status
    async def ChatStream(self, request: pb.ChatStreamRequest, context: ServicerContext) -> None:
        await self._stream(request, context, pb.ChatStreamResponse)

    @with_status
    async def Score(self, request: pb.ScoreRequest, context: ServicerContext) -> pb.ScoreResponse:
        service = self._readiness.require_serving().service
        incoming = parse_score_request(request, **fields_of_call(context, self._tokens))
        with await service.answer(incoming) as answer:
            completion = (await answer.whole()).completions[0]
        if completion.finish_reason == "abort":
            raise AbortedError(f"request {answer.id!r} was aborted before all of it was scored")
        scores = completion.prompt_logprobs or ()
        return pb.ScoreResponse(
            request_id=answer.id,
            token_ids=completion.prompt_token_ids,
            logprobs=_renderer(answer, service).logprobs(scores),
            total_logprob=sum(entry.logprob for entry in scores),
        )

    @with_status
    async def Embed(self, request: pb.EmbedRequest, context: ServicerContext) -> pb.EmbedResponse:
        service = self._readiness.require_serving().service
        request_id = request.request_id or new_id()
        requests = parse_embed_request(request, request_id, **fields_of_call(context, self._tokens))
        completions = await embed(service, requests)
        embeddings = await render_each(
            service, completions, lambda _, completion: pb.Embedding(values=completion.embedding)
        )
        return pb.EmbedResponse(
            request_id=request_id, embeddings=embeddings, usage=usage_of(completions)
        )

    @with_status
    async def Tokenize(
        self, request: pb.TokenizeRequest, context: ServicerContext
    ) -> pb.TokenizeResponse:
        service = self._readiness.require_loaded().service
        prompt, path, options = parse_tokenize_input(request)
        rendered = await service.tokenize(prompt, path, options=options)
        tell_ignored(context, rendered.unread)
        return pb.TokenizeResponse(token_ids=rendered.token_ids, prompt=rendered.text)

    @with_status
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: ServicerContext
    ) -> pb.DetokenizeResponse:
        service = self._readiness.require_loaded().service
        ids = list(request.token_ids)
        return pb.DetokenizeResponse(text=await service.detokenize(ids, "token_ids"))

    async def _whole(self, request: Any, context: ServicerContext) -> dict[str, Any]:
        state = self._readiness.require_serving()
        service = state.service
        call = fields_of_call(context, self._tokens)
        incoming = parse_request(request, service.limits, state.defaults, **call)
        with await service.answer(incoming) as answer:
            tell_ignored(context, answer.prepared.unread)
            return _renderer(answer, service).whole(await answer.whole())

    async def _stream(
        self, request: Any, context: ServicerContext, message_class: StreamEvent
    ) -> None:
        state = self._readiness.require_serving()
        service = state.service
        call = fields_of_call(context, self._tokens)
        incoming = parse_request(request, service.limits, state.defaults, **call)
        with await service.answer(incoming) as answer:
            tell_ignored(context, answer.prepared.unread)
            renderer = _renderer(answer, service)
            async with service.slow_clients.watching() as write:
                async for event in answer:
                    for message in renderer.stream(event, message_class):
                        with write:
                            await write_to(context, message)
