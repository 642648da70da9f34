"""JetStream's service jetstream_proto.Orchestrator over grpc.aio, for the clients and benchmarks written for it.

A facade over the same service object. Its requests say nothing of sampling, which was the server's choice there: here
it is --jetstream-temperature, and otherwise nothing is cut. Names and field numbers: jetstream.proto of
github.com/AI-Hypercomputer/JetStream, and of the package google-jetstream 0.2.2.
"""

from functools import partial

import grpc
from grpc.aio import ServicerContext

from jaxserve.errors import AbortedError, JaxserveError, RequestError
from jaxserve.prompts import Prompt
from jaxserve.request import SamplingParams, check_token_ids
from jaxserve.server.core.answer_events import Done, Update
from jaxserve.server.core.incoming_request import Call
from jaxserve.server.core.service import Service
from jaxserve.server.grpc.inference import answering, caller
from jaxserve.server.grpc.server import Face
from jaxserve.server.readiness import Gate, Phase
from jaxserve.server.v1 import jetstream_pb2 as pb
from jaxserve.tokenizer import Tokenizer

SERVICE = "jetstream_proto.Orchestrator"
HEALTH_CHECK = f"/{SERVICE}/HealthCheck"
NAMES = {"n": "num_samples"}  # of SamplingParams as the message calls them


def located(error: JaxserveError) -> JaxserveError:
    """With the field's name in the message."""
    if isinstance(error, RequestError) and error.field in NAMES:
        return RequestError(NAMES[error.field], error.problem)
    return error


def jetstream_face(gate: Gate, temperature: float) -> Face:
    """temperature: of every request; 0, JetStream's own default, takes the most probable token."""
    orchestrator = Orchestrator(gate, temperature)
    return Face(SERVICE, lambda server: server.add_generic_rpc_handlers((orchestrator.handlers(),)), (HEALTH_CHECK,))


class Orchestrator:
    def __init__(self, gate: Gate, temperature: float):
        self._gate, self._temperature = gate, temperature

    def handlers(self) -> grpc.GenericRpcHandler:
        """Both calls, under the name that clients know."""
        decode = grpc.unary_stream_rpc_method_handler(
            self.Decode, pb.DecodeRequest.FromString, pb.DecodeResponse.SerializeToString
        )
        health_check = grpc.unary_unary_rpc_method_handler(
            self.HealthCheck, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Decode": decode, "HealthCheck": health_check})

    @partial(answering, locate=located)
    async def Decode(self, request: pb.DecodeRequest, context: ServicerContext) -> None:
        service, has_text = self._gate.enter().service, request.HasField("text_content")
        with await service.answer(await self._call(request, service, context)) as answer:
            async with service.slow_clients.watching() as write:
                async for news in answer:
                    if isinstance(news, Done):
                        _check_whole(news, answer.id)
                    elif isinstance(news, Update) and (news.token_ids or has_text):
                        with write:
                            await context.write(_response(news, request.num_samples or 1, has_text))

    @partial(answering, locate=located)
    async def HealthCheck(self, request: pb.HealthCheckRequest, context: ServicerContext) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(is_live=self._gate.phase is Phase.READY)

    async def _call(self, request: pb.DecodeRequest, service: Service, context: ServicerContext) -> Call:
        for field in ("lora_adapter_id", "session_cache"):
            if given := getattr(request, field):
                raise RequestError(field, f"is {given!r:.80}; this server has none (leave it out)")
        params = SamplingParams(
            temperature=self._temperature, max_tokens=request.max_tokens, n=request.num_samples or 1
        )
        prompt, field = await _prompt(request, service)
        return Call(prompt=prompt, prompt_field=field, params=params, **caller(context))


async def _prompt(request: pb.DecodeRequest, service: Service) -> tuple[Prompt, str]:
    """The prompt, and its path in the request."""
    prompts, kind = service.prompts, request.WhichOneof("content")
    opening = _opening(prompts.tokenizer)
    if kind == "token_content":
        ids, field = list(request.token_content.token_ids), "token_content.token_ids"
        if len(ids) <= prompts.max_context:  # longer ones are refused unread
            check_token_ids(field, ids, prompts.vocab_size)
        return (ids if request.has_bos else opening + ids), field
    if kind is None:
        raise RequestError("content", "is missing; set text_content or token_content")
    text, field = request.text_content.text, "text_content.text"
    if not (request.has_bos and opening):
        return text, field
    return list((await service.tokenize(text, field)).token_ids[1:]), field


def _opening(tokenizer: Tokenizer) -> list[int]:
    """The token that begins a text, if the checkpoint wants one there."""
    first = tokenizer.encode("x")[:1]
    return first if first == [tokenizer.bos_id] else []


def _response(update: Update, samples: int, has_text: bool) -> pb.DecodeResponse:
    """All samples in order, of which one has news."""
    sample = pb.DecodeResponse.StreamContent.Sample
    empty, new = sample(), sample(text=update.text if has_text else "", token_ids=update.token_ids)
    content = pb.DecodeResponse.StreamContent(samples=[new if i == update.index else empty for i in range(samples)])
    return pb.DecodeResponse(stream_content=content)


def _check_whole(done: Done, id: str) -> None:
    """AbortedError for an answer that was cut short: a response cannot say so."""
    if any(completion.finish_reason == "abort" for completion in done.completions):
        raise AbortedError(f"request {id!r} was aborted")
