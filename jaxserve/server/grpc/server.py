"""gRPC servers: their services, health, reflection, limits and credentials."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.addresses import joined
from jaxserve.errors import JaxserveError
from jaxserve.flag_errors import flag_error
from jaxserve.server.core.input_bytes import InputBytes
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.admin import AdminServicer
from jaxserve.server.grpc.inference import InferenceServicer
from jaxserve.server.grpc.messages import MessageReader, MetadataLimit, refusing, service_of
from jaxserve.server.grpc.reflection import SERVICES, add_reflection
from jaxserve.server.readiness import Phase
from jaxserve.server.security.auth import BearerTokens
from jaxserve.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
FULL_CONNECTIONS = 4  # whose calls may all wait for the event loop at a time
Serving = health_pb2.HealthCheckResponse.ServingStatus


class TokenInterceptor(aio.ServerInterceptor):
    """Checks the token of every call but health checks."""

    def __init__(self, tokens: BearerTokens):
        self._tokens = tokens

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        service = service_of(handler_call_details.method)
        if service != HEALTH:
            metadata = handler_call_details.invocation_metadata
            given = [value for key, value in metadata if key == "authorization"]
            try:
                self._tokens.check(given, admin=service == ADMIN)
            except JaxserveError as error:
                return refusing(error)
        return await continuation(handler_call_details)


class _HealthServicer(health_pb2_grpc.HealthServicer):
    """Health service whose watches end when the server does.

    A server that stops waits for every open call, and a watch has no end of its own. Watches end
    between two messages: a call whose message is cut off cannot be ended any more.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._ending = False
        self.watches = 0

    def set(self, service: str, status: int) -> None:
        self._statuses[service] = status
        self._wake()

    def end_watches(self) -> None:
        self._ending = True
        self._wake()

    def _wake(self) -> None:
        # A new event for each change: every watch waits for the one after the status it has sent.
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"this server has no service {request.service!r:.80}"
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext
    ) -> None:
        self.watches += 1
        try:
            await self._tell(request.service, context)
        finally:
            self.watches -= 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server ends")

    async def _tell(self, service: str, context: aio.ServicerContext) -> None:
        """Write the status whenever it changes, until the watches end."""
        reported = None
        while True:
            changed = self._changed
            status = self._statuses.get(service, Serving.SERVICE_UNKNOWN)
            if status != reported:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                reported = status
            elif self._ending:  # only now, so that every watch is told the last status
                break
            else:
                await changed.wait()


@dataclass(frozen=True)
class GrpcEndpoint:
    """A gRPC service that a server may have beside InferenceService and AdminService."""

    name: str  # full name of the service
    add: Callable[[aio.Server], None]  # adds the service's servicer to a server


class Health:
    """grpc.health.v1 of a server with these services.

    The empty name and AdminService are always SERVING while the process lives. InferenceService and
    the endpoints are SERVING only while the server is ready.
    """

    def __init__(
        self, inference: bool = True, admin: bool = True, *endpoints: GrpcEndpoint
    ) -> None:
        self._ready = [endpoint.name for endpoint in endpoints]
        if inference:
            self._ready.append(INFERENCE)
        self.servicer = _HealthServicer()
        for name in ("", *([ADMIN] if admin else [])):
            self.servicer.set(name, Serving.SERVING)
        self.tell(Phase.LOADING)

    def tell(self, phase: Phase) -> None:
        """Report a new phase to health checks and watches."""
        status = Serving.SERVING if phase is Phase.READY else Serving.NOT_SERVING
        for name in self._ready:
            self.servicer.set(name, status)

    @property
    def is_watched(self) -> bool:
        """Return whether a client is told of every new status."""
        return self.servicer.watches > 0

    def close(self) -> None:
        """End all watches."""
        self.servicer.end_watches()


def new_server(
    limits: Limits,
    tokens: BearerTokens,
    health: Health,
    inference: InferenceServicer | None,
    admin: AdminServicer | None,
    *endpoints: GrpcEndpoint,
    inputs: InputBytes | None = None,
) -> aio.Server:
    """Return a server with these services, not yet bound to an address.

    Args:
        inputs: Bytes of requests, if other servers share their limit.
    """
    inputs = inputs or InputBytes(limits.max_input_bytes)
    reader = MessageReader(limits, inputs, {HEALTH, *SERVICES}, open_to_all=HEALTH)
    interceptors = [MetadataLimit(limits), TokenInterceptor(tokens), reader]
    server = aio.server(interceptors=interceptors, options=_options(limits))
    names = [HEALTH]
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if inference:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
        names.append(INFERENCE)
    if admin:
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        names.append(ADMIN)
    for endpoint in endpoints:
        endpoint.add(server)
        names.append(endpoint.name)
    add_reflection(server, names)
    return server


def bind(
    server: aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None, flag: str
) -> int:
    """Bind a server to an address and return its port, chosen by the system where `port` is 0.

    Args:
        flag: Flag that gave the port, for the error.

    Raises:
        ConfigError: The port is taken.
    """
    address = joined(host, port)
    try:
        if credentials:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError:
        problem = f"nothing can listen on {address} (is it taken?)"
        raise flag_error(flag, port, problem) from None


def _options(limits: Limits) -> list[tuple[str, int]]:
    streams = int(limits.max_streams_per_connection)
    # gRPC ignores misspelt options in silence: a test checks the effect of each of these.
    return [
        ("grpc.max_receive_message_length", int(limits.max_message_bytes)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", int(limits.max_header_bytes)),
        ("grpc.absolute_max_metadata_size", int(limits.max_header_bytes)),
        ("grpc.max_concurrent_streams", streams),
        ("grpc.max_allowed_incoming_connections", limits.max_grpc_connections),
        ("grpc.per_message_decompression", 0),  # MessageReader does it, within bounds
        # Its protection against reset streams lowers the number of streams below the one above
        # while ended calls wait for the event loop, and refuses the rest without a word.
        ("grpc.http.overload_protection", 0),
        # Calls that wait for the event loop, over all connections: from 1,000 on, by default, gRPC
        # cancels one or another at random, from 3,000 on all.
        ("grpc.server.max_pending_requests", FULL_CONNECTIONS * streams),
        ("grpc.server.max_pending_requests_hard_limit", 2 * FULL_CONNECTIONS * streams),
        ("grpc.so_reuseport", 0),  # else two servers could share a port in silence
        # By default the pings of clients that wait for a long prompt count as an attack.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Find clients whose machine or network failed, which close no connection.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),  # of gRPC's own pings; 60 s by default
    ]
