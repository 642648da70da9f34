"""vllm.grpc.engine.VllmEngine over grpc.aio: what routers such as smg ask of their workers.

The messages are those of the package smg-grpc-proto. A router tokenizes, and applies chat
templates, with the files that GetTokenizer hands out; prompts and completions are token ids.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property, partial

from grpc import aio  # type: ignore[attr-defined]
from grpc.aio import ServicerContext
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from jaxserve.errors import RequestError
from jaxserve.server.core.embedding import embed, embedding_requests
from jaxserve.server.core.service import new_id
from jaxserve.server.grpc.admin import MAX_ABORTS
from jaxserve.server.grpc.inference import answering, caller
from jaxserve.server.grpc.server import GrpcEndpoint
from jaxserve.server.grpc.tokenizer_bundle import tokenizer_bundle
from jaxserve.server.grpc.vllm_messages import Writer, call_of, embed_input_of, naming
from jaxserve.server.readiness import Phase, Readiness

NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
SERVER_TYPE = "jaxserve"
CHUNK = 64 * 1024  # bytes of a message of GetTokenizer
# smg first looks for this on its disk and on Hugging Face's hub, where something else may have the
# model's name.
TOKENIZER_PATH = "grpc:GetTokenizer"


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Not built in, and UNIMPLEMENTED: FlushCache and profiles, which AdminService has, and
    SubscribeKvEvents.
    """

    def __init__(self, readiness: Readiness):
        self._readiness = readiness
        self._asked = Counter[str]()  # calls by id: all but the first of an id are refused

    @answering
    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> None:
        service = self._readiness.require_ready().service
        call = call_of(request, **caller(context))
        with self._abortable(request.request_id), naming(), await service.answer(call) as answer:
            writer = Writer(answer.prepared.request, request.stream)
            async with service.slow_clients.watching() as write:
                async for news in answer:
                    for message in writer.messages(news):
                        with write:
                            await context.write(message)

    @answering
    async def Embed(self, request: pb.EmbedRequest, context: ServicerContext) -> pb.EmbedResponse:
        service = self._readiness.require_ready().service
        request_id = request.request_id or new_id()
        calls = embedding_requests([embed_input_of(request)], request_id, **caller(context))
        with self._abortable(request_id):
            (completion,) = await embed(service, calls)
        values = completion.embedding or ()
        return pb.EmbedResponse(
            embedding=values,
            prompt_tokens=len(completion.prompt_token_ids),
            embedding_dim=len(values),
        )

    @answering
    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortResponse:
        """Their streams end with finish reason abort. Ids that are not in flight may just have
        ended: no error.

        A client's token is enough, so requests that came by other doors are left alone.
        """
        if len(request.request_ids) > MAX_ABORTS:
            raise RequestError(
                "request_ids", f"has {len(request.request_ids)} entries; the limit is {MAX_ABORTS}"
            )
        service = self._readiness.require_loaded().service
        for request_id in self._asked.keys() & request.request_ids:
            service.abort(request_id)
        return pb.AbortResponse()

    @contextmanager
    def _abortable(self, request_id: str) -> Iterator[None]:
        self._asked[request_id] += 1
        try:
            yield
        finally:
            self._asked -= Counter([request_id])  # those that have none left go

    @answering
    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: ServicerContext
    ) -> pb.HealthCheckResponse:
        """Healthy is who takes requests: neither loading nor draining."""
        return pb.HealthCheckResponse(
            healthy=self._readiness.phase is Phase.READY, message=self._readiness.phase
        )

    @answering
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: ServicerContext
    ) -> pb.GetModelInfoResponse:
        served = self._readiness.require_loaded()
        model, bos_id = served.model, served.service.prompts.tokenizer.bos_id
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
            bos_token_id=bos_id or 0,
        )

    @answering
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: ServicerContext
    ) -> pb.GetServerInfoResponse:
        served = self._readiness.require_loaded()
        return pb.GetServerInfoResponse(
            active_requests=served.service.in_flight,
            is_paused=self._readiness.phase is not Phase.READY,
            uptime_seconds=time.monotonic() - served.ready_since,
            server_type=SERVER_TYPE,
            data_parallel_size=1,  # lanes are filled by the server itself
            block_size=served.engine.page_size,
            model_dtype=served.model.dtype,
            max_num_seqs=served.engine.rows,
        )

    @answering
    async def GetLoads(
        self, request: pb.GetLoadsRequest, context: ServicerContext
    ) -> pb.GetLoadsResponse:
        if request.dp_rank:
            raise RequestError("dp_rank", f"is {request.dp_rank}; there is rank 0 alone")
        served = self._readiness.require_loaded()
        loads = served.service.loads
        usage = loads.pages_used / loads.pages_total if loads.pages_total else 0.0
        load = pb.SchedulerLoad(
            num_running_reqs=loads.running,
            num_waiting_reqs=loads.waiting,
            num_total_reqs=loads.running + loads.waiting,
            num_used_tokens=round(usage * served.engine.cache_tokens),
            max_total_num_tokens=served.engine.cache_tokens,
            token_usage=usage,
            max_running_requests=served.engine.rows,
            num_waiting_uncached_tokens=served.service.waiting_tokens,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=served.engine.versions["jaxserve"],
            dp_rank_count=1,
            loads=[load],
        )

    @answering
    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: ServicerContext
    ) -> None:
        self._readiness.require_loaded()
        data = await asyncio.shield(self._bundle)
        for start in range(0, len(data), CHUNK):
            last = start + CHUNK >= len(data)
            digest = hashlib.sha256(data).hexdigest() if last else ""
            await context.write(
                common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK], sha256=digest)
            )

    @cached_property
    def _bundle(self) -> "asyncio.Future[bytes]":
        """Made once, beside the event loop."""
        service = self._readiness.require_loaded().service
        return asyncio.ensure_future(
            service.run_in_background(partial(tokenizer_bundle, service.prompts.chat))
        )


def vllm_endpoint(readiness: Readiness) -> GrpcEndpoint:
    def add(server: aio.Server) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(readiness), server)

    return GrpcEndpoint(NAME, add)
