"""jaxserve.v1.AdminService over grpc.aio."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import fields

from grpc.aio import ServicerContext

from jaxserve.errors import RequestError
from jaxserve.server.grpc.inference import answering
from jaxserve.server.observe.profiler import Profiler
from jaxserve.server.readiness import Readiness
from jaxserve.v1 import admin_pb2 as pb
from jaxserve.v1 import admin_pb2_grpc

MAX_ABORTS = 4096


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """drain: begins to end the server."""

    def __init__(self, readiness: Readiness, profiler: Profiler, drain: Callable[[], None]):
        self._readiness, self._profiler, self._drain = readiness, profiler, drain

    @answering
    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortResponse:
        if not 1 <= len(request.request_ids) <= MAX_ABORTS:
            raise RequestError(
                "request_ids", f"has {len(request.request_ids)} entries; give 1 to {MAX_ABORTS}"
            )
        service = self._readiness.require_loaded().service
        return pb.AbortResponse(
            aborted_request_ids=[id for id in request.request_ids if service.abort(id)]
        )

    @answering
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: ServicerContext
    ) -> pb.GetModelInfoResponse:
        model = self._readiness.require_loaded().model
        return pb.GetModelInfoResponse(
            name=model.name,
            architecture=model.architecture,
            parameters=model.parameters,
            dtype=model.dtype,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=model.eos_ids,
            has_chat_template=model.has_chat_template,
            embedding_dimensions=model.embedding_dimensions,
            weights=model.weights,
            weight_bytes={
                f"{part} {dtype}": n
                for part, held in model.sizes.items()
                for dtype, n in held.items()
            },
        )

    @answering
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: ServicerContext
    ) -> pb.GetServerInfoResponse:
        served = self._readiness.require_loaded()
        engine, limits = served.engine, served.service.limits
        return pb.GetServerInfoResponse(
            versions=engine.versions,
            mesh=engine.mesh,
            device_kind=engine.device_kind,
            buckets=engine.buckets,
            max_batch=engine.max_batch,
            step_tokens=engine.step_tokens,
            page_size=engine.page_size,
            cache_tokens=engine.cache_tokens,
            limits={field.name: getattr(limits, field.name) for field in fields(limits)},
            uptime_seconds=time.monotonic() - served.ready_since,
            compiles_after_ready=served.compiles_after_ready(),
            kv=engine.kv,
        )

    @answering
    async def GetLoads(
        self, request: pb.GetLoadsRequest, context: ServicerContext
    ) -> pb.GetLoadsResponse:
        service = self._readiness.require_loaded().service
        return pb.GetLoadsResponse(
            running=service.loads.running,
            waiting=service.loads.waiting,
            waiting_tokens=service.waiting_tokens,
            pages_used=service.loads.pages_used,
            pages_total=service.loads.pages_total,
            requests=service.in_flight,
        )

    @answering
    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: ServicerContext
    ) -> pb.FlushCacheResponse:
        flushed = self._readiness.require_loaded().thread.call(
            lambda engine: engine.scheduler.flush_cache()
        )
        await asyncio.wrap_future(flushed)
        return pb.FlushCacheResponse()

    @answering
    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.DrainResponse:
        in_flight = self._readiness.state.service.in_flight if self._readiness.state else 0
        self._drain()
        return pb.DrainResponse(requests=in_flight)

    @answering
    async def StartProfile(
        self, request: pb.StartProfileRequest, context: ServicerContext
    ) -> pb.StartProfileResponse:
        seconds = request.max_seconds if request.HasField("max_seconds") else None
        return pb.StartProfileResponse(folder=await self._profiler.start(seconds))

    @answering
    async def StopProfile(
        self, request: pb.StopProfileRequest, context: ServicerContext
    ) -> pb.StopProfileResponse:
        return pb.StopProfileResponse(folder=await self._profiler.stop())
