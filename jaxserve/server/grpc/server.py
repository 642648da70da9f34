"""The gRPC server: services, health, reflection, bounds and credentials."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.admin import AdminServicer
from jaxserve.server.grpc.inference import InferenceServicer, end
from jaxserve.server.readiness import Phase
from jaxserve.server.security.auth import BearerTokens
from jaxserve.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
Serving = health_pb2.HealthCheckResponse.ServingStatus


class TokenInterceptor(aio.ServerInterceptor):
    """Asks every call but health checks for its token."""

    def __init__(self, tokens: BearerTokens):
        self._tokens = tokens

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        service = handler_call_details.method.rsplit("/", 1)[0].lstrip("/")
        if service != HEALTH:
            metadata = dict(handler_call_details.invocation_metadata)
            try:
                self._tokens.check(metadata.get("authorization"), admin=service == ADMIN)
            except JaxserveError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: JaxserveError) -> grpc.RpcMethodHandler:
    async def refuse(request: Any, context: aio.ServicerContext) -> None:
        await end(context, error)

    return grpc.unary_unary_rpc_method_handler(refuse)


class _HealthServicer(health_pb2_grpc.HealthServicer):
    """With watches that end when the server does: gRPC waits for every open call.

    They end between two messages: a call whose message is cut off cannot be ended any more.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._over = False

    def set(self, service: str, status: int) -> None:
        self._statuses[service] = status
        self._wake()

    def end_watches(self) -> None:
        self._over = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if (status := self._statuses.get(request.service)) is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r:.80} here"
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext
    ) -> None:
        told = None
        while not self._over:
            changed, status = (
                self._changed,
                self._statuses.get(request.service, Serving.SERVICE_UNKNOWN),
            )
            if status == told:
                await changed.wait()
            else:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server ends")


@dataclass(frozen=True)
class GrpcEndpoint:
    """A service of another project's protocol. name: its full one. add: puts its servicer on a
    server.
    """

    name: str
    add: Callable[[aio.Server], None]


class Health:
    """grpc.health.v1: "" says that the process lives; the names of InferenceService and of faces,
    whether it is ready.

    inference, admin, faces: the services that the server has.
    """

    def __init__(
        self, inference: bool = True, admin: bool = True, *endpoints: GrpcEndpoint
    ) -> None:
        self._ready = [*([INFERENCE] if inference else []), *(face.name for face in endpoints)]
        self.servicer = _HealthServicer()
        for name in ("", *([ADMIN] if admin else [])):  # which answer in every phase
            self.servicer.set(name, Serving.SERVING)
        self.tell(Phase.LOADING)

    def tell(self, phase: Phase) -> None:
        status = Serving.SERVING if phase is Phase.READY else Serving.NOT_SERVING
        for name in self._ready:
            self.servicer.set(name, status)

    def close(self) -> None:
        """Nobody hears of it any more."""
        self.servicer.end_watches()


def new_server(
    limits: Limits,
    tokens: BearerTokens,
    health: Health,
    inference: InferenceServicer | None,
    admin: AdminServicer | None,
    *endpoints: GrpcEndpoint,
) -> aio.Server:
    """A server with these services, not yet bound to an address."""
    server = aio.server(interceptors=[TokenInterceptor(tokens)], options=_options(limits))
    names = [HEALTH, reflection.SERVICE_NAME]
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if inference:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
        names.append(INFERENCE)
    if admin:
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        names.append(ADMIN)
    for face in endpoints:
        face.add(server)
        names.append(face.name)
    reflection.enable_server_reflection(names, server)
    return server


def bind(
    server: aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None, flag: str
) -> int:
    """Listen; returns the port (0 asks for any). ConfigError when it is taken."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = (
            server.add_secure_port(address, credentials)
            if credentials
            else server.add_insecure_port(address)
        )
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigError(f"{flag} {port}: cannot listen on {address} (is it taken?)")
    return bound


def _options(limits: Limits) -> list[tuple[str, int]]:
    """Misspelt options are ignored in silence: a test compares each of them with what it does."""
    return [
        ("grpc.max_receive_message_length", int(limits.max_message_bytes)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", int(limits.max_header_bytes)),
        ("grpc.absolute_max_metadata_size", int(limits.max_header_bytes)),
        ("grpc.max_concurrent_streams", int(limits.max_streams_per_connection)),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its calls in silence
        # Clients that ask whether the connection lives while a long prompt is computed are no
        # attackers.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client whose machine went away says no goodbye.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        (
            "grpc.http2.ping_timeout_ms",
            20_000,
        ),  # the same for gRPC's own pings, which otherwise take 60 s
    ]
