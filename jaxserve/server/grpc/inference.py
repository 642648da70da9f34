"""jaxserve.v1.InferenceService over grpc.aio."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc.aio import AbortError, ServicerContext

from jaxserve.errors import AbortedError, JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.embedding import embed, render_each
from jaxserve.server.core.incoming_request import trace_of
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.server.core.service import Service, new_id
from jaxserve.server.core.status import trailers
from jaxserve.server.grpc.messages import (
    StreamEvent,
    Writer,
    call_of,
    check_known,
    embed_calls_of,
    input_of,
    located,
    score_call_of,
    usage_of,
)
from jaxserve.server.readiness import Readiness
from jaxserve.v1 import inference_pb2 as pb
from jaxserve.v1 import inference_pb2_grpc

Method = Callable[[Any, Any, ServicerContext], Awaitable[Any]]


def answering(method: Method) -> Method:
    """Refuse unknown fields, and turn errors into statuses. Cancellation passes through."""

    @wraps(method)
    async def answered(self: Any, request: Message, context: ServicerContext) -> Any:
        try:
            check_known(request)
            return await method(self, request, context)
        except (AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            await end(context, located(mask_internal_error(error)))

    return answered


async def end(context: ServicerContext, error: JaxserveError) -> None:
    """End the call with the error's status."""
    await context.abort(grpc.StatusCode[error.code], str(error), trailers(error))


def caller(context: ServicerContext) -> dict[str, Any]:
    """The fields of Call that are not in the request."""
    return {
        "timeout": context.time_remaining(),
        "trace": trace_of(context.invocation_metadata() or ()),
    }


def _writer(answer: Answer, service: Service) -> Writer:
    return Writer(answer.id, service.prompts.tokenizer, answer.prepared.reading)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, readiness: Readiness):
        self._readiness = readiness

    @answering
    async def Generate(
        self, request: pb.GenerateRequest, context: ServicerContext
    ) -> pb.GenerateResponse:
        return pb.GenerateResponse(**await self._whole(request, context))

    @answering
    async def Chat(self, request: pb.ChatRequest, context: ServicerContext) -> pb.ChatResponse:
        return pb.ChatResponse(**await self._whole(request, context))

    @answering
    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: ServicerContext
    ) -> None:
        await self._stream(request, context, pb.GenerateStreamResponse)

    @answering
    async def ChatStream(self, request: pb.ChatStreamRequest, context: ServicerContext) -> None:
        await self._stream(request, context, pb.ChatStreamResponse)

    @answering
    async def Score(self, request: pb.ScoreRequest, context: ServicerContext) -> pb.ScoreResponse:
        service = self._readiness.require_ready().service
        with await service.answer(score_call_of(request, **caller(context))) as answer:
            completion = (await answer.whole()).completions[0]
        if completion.finish_reason == "abort":
            raise AbortedError(f"request {answer.id!r} was aborted before all of it was scored")
        scores = completion.prompt_logprobs or ()
        return pb.ScoreResponse(
            request_id=answer.id,
            token_ids=completion.prompt_token_ids,
            logprobs=_writer(answer, service).logprobs(scores),
            total_logprob=sum(entry.logprob for entry in scores),
        )

    @answering
    async def Embed(self, request: pb.EmbedRequest, context: ServicerContext) -> pb.EmbedResponse:
        service = self._readiness.require_ready().service
        request_id = request.request_id or new_id()
        done = await embed(service, embed_calls_of(request, request_id, **caller(context)))
        embeddings = await render_each(
            service, done, lambda _, completion: pb.Embedding(values=completion.embedding)
        )
        return pb.EmbedResponse(request_id=request_id, embeddings=embeddings, usage=usage_of(done))

    @answering
    async def Tokenize(
        self, request: pb.TokenizeRequest, context: ServicerContext
    ) -> pb.TokenizeResponse:
        service = self._readiness.require_loaded().service
        rendered = await service.tokenize(*input_of(request))
        return pb.TokenizeResponse(token_ids=rendered.token_ids, prompt=rendered.text)

    @answering
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: ServicerContext
    ) -> pb.DetokenizeResponse:
        service = self._readiness.require_loaded().service
        ids = list(request.token_ids)
        return pb.DetokenizeResponse(text=await service.detokenize(ids, "token_ids"))

    async def _whole(self, request: Any, context: ServicerContext) -> dict[str, Any]:
        service = self._readiness.require_ready().service
        with await service.answer(call_of(request, service.limits, **caller(context))) as answer:
            return _writer(answer, service).whole(await answer.whole())

    async def _stream(self, request: Any, context: ServicerContext, event: StreamEvent) -> None:
        service = self._readiness.require_ready().service
        with await service.answer(call_of(request, service.limits, **caller(context))) as answer:
            writer = _writer(answer, service)
            async with service.slow_clients.watching() as write:
                async for news in answer:
                    for message in writer.stream(news, event):
                        with write:
                            await context.write(message)
