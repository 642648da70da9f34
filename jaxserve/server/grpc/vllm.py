"""vllm.grpc.engine.VllmEngine over grpc.aio: the service that routers such as smg expect.

The package smg-grpc-proto has the messages. A router tokenizes, and applies chat templates, with
the files that GetTokenizer returns; prompts and completions are token ids.
"""

import asyncio
import hashlib
import time
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any

from grpc.aio import ServicerContext
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from jaxserve.errors import RequestError
from jaxserve.server.core.embedding import embed, embedding_requests
from jaxserve.server.core.incoming_request import new_id
from jaxserve.server.grpc.admin import MAX_ABORTS
from jaxserve.server.grpc.inference import fields_of_call, with_status, write_to
from jaxserve.server.grpc.server import GrpcEndpoint
from jaxserve.server.grpc.tokenizer_bundle import tokenizer_bundle
from jaxserve.server.grpc.vllm_parse import parse_embed, parse_generate, sampling_path
from jaxserve.server.grpc.vllm_render import VllmRenderer
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.security.auth import BearerTokens, token_of

NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
SERVER_TYPE = "jaxserve"
CHUNK_BYTES = 64 * 1024  # of a message of GetTokenizer
# Not the model's name: smg first looks for this path on its disk and on Hugging Face's hub, where
# another model may have that name.
TOKENIZER_PATH = "grpc:GetTokenizer"


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Generation, embedding and information as vLLM's engines offer them to routers.

    Calls that are not built in answer UNIMPLEMENTED: SubscribeKvEvents, and FlushCache and
    profiles, which AdminService has.
    """

    def __init__(self, readiness: Readiness, tokens: BearerTokens):
        self._readiness = readiness
        self._tokens = tokens

    @with_status
    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> None:
        service = self._readiness.require_serving().service
        incoming = parse_generate(request, **self._fields_of_call(context))
        with sampling_path(), await service.answer(incoming) as answer:
            renderer = VllmRenderer(answer.prepared.request, request.stream)
            async with service.slow_clients.watching() as write:
                async for event in answer:
                    for message in renderer.messages(event):
                        with write:
                            await write_to(context, message)

    @with_status
    async def Embed(self, request: pb.EmbedRequest, context: ServicerContext) -> pb.EmbedResponse:
        service = self._readiness.require_serving().service
        request_id = request.request_id or new_id()
        call = self._fields_of_call(context)
        requests = embedding_requests([parse_embed(request)], request_id, **call)
        (completion,) = await embed(service, requests)
        values = completion.embedding or ()
        return pb.EmbedResponse(
            embedding=values,
            prompt_tokens=len(completion.prompt_token_ids),
            embedding_dim=len(values),
        )

    @with_status
    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortResponse:
        """End requests of this service with the caller's token; their streams finish with abort.

        An id that is not in flight is no error: the request may just have ended. Other requests are
        left alone, since a client's token is enough for this call.
        """
        if len(request.request_ids) > MAX_ABORTS:
            raise RequestError(
                "request_ids", f"has {len(request.request_ids)} entries; the limit is {MAX_ABORTS}"
            )
        service = self._readiness.require_loaded().service
        for request_id in request.request_ids:
            service.abort(request_id, owner=_owner(context))
        return pb.AbortResponse()

    def _fields_of_call(self, context: ServicerContext) -> dict[str, Any]:
        return fields_of_call(context, self._tokens) | {"owner": _owner(context)}

    @with_status
    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: ServicerContext
    ) -> pb.HealthCheckResponse:
        """Say that the server is healthy when it takes requests: not while loading or draining."""
        return pb.HealthCheckResponse(
            healthy=self._readiness.phase is Phase.READY, message=self._readiness.phase
        )

    @with_status
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: ServicerContext
    ) -> pb.GetModelInfoResponse:
        state = self._readiness.require_loaded()
        model = state.model
        return pb.GetModelInfoResponse(
            model_path=model.name,
            tokenizer_path=TOKENIZER_PATH,
            served_model_name=model.name,
            model_type=model.architecture,
            is_generation=not model.embedding_dimensions,
            vocab_size=model.vocab_size,
            max_context_length=model.max_context,
            max_req_input_len=model.max_context,
            eos_token_ids=model.eos_ids,
            bos_token_id=state.service.prompts.tokenizer.bos_id or 0,
        )

    @with_status
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: ServicerContext
    ) -> pb.GetServerInfoResponse:
        state = self._readiness.require_loaded()
        return pb.GetServerInfoResponse(
            active_requests=state.service.in_flight,
            is_paused=self._readiness.phase is not Phase.READY,
            uptime_seconds=time.monotonic() - state.ready_since,
            server_type=SERVER_TYPE,
            data_parallel_size=1,  # the server itself spreads requests over its lanes
            block_size=state.engine.page_size,
            model_dtype=state.model.dtype,
            max_num_seqs=state.engine.rows,
        )

    @with_status
    async def GetLoads(
        self, request: pb.GetLoadsRequest, context: ServicerContext
    ) -> pb.GetLoadsResponse:
        if request.dp_rank:
            raise RequestError("dp_rank", f"is {request.dp_rank}; rank 0 is the only one")
        state = self._readiness.require_loaded()
        loads = state.service.loads
        usage = loads.pages_used / loads.pages_total if loads.pages_total else 0.0
        load = pb.SchedulerLoad(
            num_running_reqs=loads.running,
            num_waiting_reqs=loads.waiting,
            num_total_reqs=loads.running + loads.waiting,
            num_used_tokens=round(usage * state.engine.cache_tokens),
            max_total_num_tokens=state.engine.cache_tokens,
            token_usage=usage,
            max_running_requests=state.engine.rows,
            num_waiting_uncached_tokens=state.service.waiting_tokens,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=state.engine.versions["jaxserve"],
            dp_rank_count=1,
            loads=[load],
        )

    @with_status
    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: ServicerContext
    ) -> None:
        service = self._readiness.require_loaded().service
        data = await asyncio.shield(self._bundle)
        async with service.slow_clients.watching() as write:
            for start in range(0, len(data), CHUNK_BYTES):
                end = start + CHUNK_BYTES
                digest = hashlib.sha256(data).hexdigest() if end >= len(data) else ""
                with write:
                    chunk = common_pb2.GetTokenizerChunk(data=data[start:end], sha256=digest)
                    await write_to(context, chunk)

    @cached_property
    def _bundle(self) -> "asyncio.Future[bytes]":
        """The archive of tokenizer files, made once and beside the event loop."""
        service = self._readiness.require_loaded().service
        prompts = service.prompts
        return asyncio.ensure_future(
            service.run_in_background(partial(tokenizer_bundle, prompts.chat, prompts.vocab_size))
        )


def _owner(context: ServicerContext) -> str:
    """Return who may abort requests of this service that come with the caller's token."""
    authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
    return f"{NAME} {token_of(str(authorization))}"


def vllm_endpoint(readiness: Readiness, tokens: BearerTokens) -> GrpcEndpoint:
    """Return the service for a gRPC server's port."""
    add = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server
    return GrpcEndpoint(NAME, partial(add, VllmEngineServicer(readiness, tokens)))
