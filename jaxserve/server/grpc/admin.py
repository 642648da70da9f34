"""jaxserve.v1.AdminService over grpc.aio."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import fields

from grpc.aio import ServicerContext

from jaxserve.errors import RequestError
from jaxserve.server.grpc.inference import with_status
from jaxserve.server.observe.profiler import Profiler
from jaxserve.server.readiness import Readiness
from jaxserve.v1 import admin_pb2 as pb
from jaxserve.v1 import admin_pb2_grpc

MAX_ABORTS = 4096  # ids of one call


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Information about the server, and operations on it, over gRPC.

    Args:
        drain: Function that begins to end the server.
    """

    def __init__(self, readiness: Readiness, profiler: Profiler, drain: Callable[[], None]):
        self._readiness = readiness
        self._profiler = profiler
        self._drain = drain

    @with_status
    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortResponse:
        if not 1 <= len(request.request_ids) <= MAX_ABORTS:
            raise RequestError(
                "request_ids", f"has {len(request.request_ids)} entries; give 1 to {MAX_ABORTS}"
            )
        service = self._readiness.require_loaded().service
        return pb.AbortResponse(
            aborted_request_ids=[id for id in request.request_ids if service.abort(id)]
        )

    @with_status
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
                f"{part} {dtype}": size
                for part, by_dtype in model.sizes.items()
                for dtype, size in by_dtype.items()
            },
        )

    @with_status
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: ServicerContext
    ) -> pb.GetServerInfoResponse:
        state = self._readiness.require_loaded()
        engine = state.engine
        limits = state.service.limits
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
            uptime_seconds=time.monotonic() - state.ready_since,
            compiles_after_ready=state.compiles_after_ready(),
            background_compiles=state.background_compiles(),
            buckets_pending=state.buckets_pending(),
            kv=engine.kv,
        )

    @with_status
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
            queue_seconds=service.queue_seconds,
        )

    @with_status
    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: ServicerContext
    ) -> pb.FlushCacheResponse:
        flushed = self._readiness.require_loaded().thread.call(
            lambda engine: engine.scheduler.flush_cache()
        )
        await asyncio.wrap_future(flushed)
        return pb.FlushCacheResponse()

    @with_status
    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.DrainResponse:
        state = self._readiness.state
        in_flight = state.service.in_flight if state else 0  # None while the model is loaded
        self._drain()
        return pb.DrainResponse(requests=in_flight)

    @with_status
    async def StartProfile(
        self, request: pb.StartProfileRequest, context: ServicerContext
    ) -> pb.StartProfileResponse:
        seconds = request.max_seconds if request.HasField("max_seconds") else None
        return pb.StartProfileResponse(folder=await self._profiler.start(seconds))

    @with_status
    async def StopProfile(
        self, request: pb.StopProfileRequest, context: ServicerContext
    ) -> pb.StopProfileResponse:
        return pb.StopProfileResponse(folder=await self._profiler.stop())
