"""Every address that the server listens on."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterable

from grpc import aio  # type: ignore[attr-defined]
from prometheus_client.metrics_core import Metric

from jaxserve.errors import ConfigError
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.admin import AdminServicer
from jaxserve.server.grpc.inference import InferenceServicer
from jaxserve.server.grpc.server import GrpcEndpoint, Health, bind, new_server
from jaxserve.server.http.app import new_app
from jaxserve.server.http.server import HttpServer
from jaxserve.server.observe.profiler import Profiler
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.security.tls import Tls


class Listeners:
    """gRPC, AdminService and faces on ports of their own, and HTTP. They answer from the start:
    LOADING at first.
    """

    def __init__(
        self,
        readiness: Readiness,
        limits: Limits,
        tokens: BearerTokens,
        metrics: Callable[[], Awaitable[bytes]],
        families: Callable[[], Iterable[Metric]] = tuple,
        endpoints: tuple[GrpcEndpoint, ...] = (),
    ):
        """metrics, families: see `new_app`. faces: beside InferenceService, on its port."""
        self._readiness, self._limits, self._tokens = readiness, limits, tokens
        self._metrics, self._families, self._faces = metrics, families, endpoints
        self._healths: list[Health] = []
        self._grpc: list[aio.Server] = []
        self._http: HttpServer | None = None
        self._profiler: Profiler | None = None
        self.addresses = ""

    async def start(
        self,
        args: argparse.Namespace,
        drain: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Bind all of them, then listen. ConfigError when a port is taken or a certificate is not
        one.

        drain: for AdminService. failed: called when a listener ends by itself.
        """
        tls = Tls.of(args.tls_cert, args.tls_key, args.tls_client_ca)
        credentials = tls.credentials() if tls else None
        self._profiler = Profiler(args.profile_dir)
        inference, admin = (
            InferenceServicer(self._readiness),
            AdminServicer(self._readiness, self._profiler, drain),
        )
        apart = args.admin_port is not None
        beside = None if apart else admin
        found = {
            "gRPC": self._add(
                inference, beside, args.host, args.port, credentials, "--port", *self._faces
            )
        }
        if apart:
            found["admin"] = self._add(
                None, admin, args.host, args.admin_port, credentials, "--admin-port"
            )
        if args.vllm_port is not None:
            face = _vllm_endpoint(self._readiness)
            found["vLLM"] = self._add(
                None, None, args.host, args.vllm_port, credentials, "--vllm-port", face
            )
        if not args.no_http:
            app = new_app(
                self._readiness, self._tokens, self._limits, self._metrics, self._families
            )
            self._http = HttpServer(app, args.host, args.http_port, tls, self._limits)
            found["HTTP"] = self._http.port
        self.addresses = ", ".join(f"{name} {args.host}:{port}" for name, port in found.items())
        for server in self._grpc:
            await server.start()
        if self._http:
            self._http.start(failed)

    def _add(
        self,
        inference: InferenceServicer | None,
        admin: AdminServicer | None,
        host: str,
        port: int,
        credentials: object,
        flag: str,
        *endpoints: GrpcEndpoint,
    ) -> int:
        health = Health(inference is not None, admin is not None, *endpoints)
        server = new_server(self._limits, self._tokens, health, inference, admin, *endpoints)
        self._grpc.append(server)
        self._healths.append(health)
        return bind(server, host, port, credentials, flag)  # type: ignore[arg-type]

    def tell(self, phase: Phase) -> None:
        """Health checks answer by the new phase."""
        for health in self._healths:
            health.tell(phase)

    async def stop(self, grace: float) -> None:
        """Close all; calls that are open have so many seconds to be read to their end."""
        if self._profiler:
            await self._profiler.close()
        for health in self._healths:
            health.close()
        stopping = [server.stop(grace) for server in self._grpc] + (
            [self._http.stop(grace)] if self._http else []
        )
        await asyncio.gather(*stopping)


def _vllm_endpoint(readiness: Readiness) -> GrpcEndpoint:
    """ConfigError without the package that has its messages."""
    try:
        from jaxserve.server.grpc.vllm import vllm_endpoint
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "smg_grpc_proto":
            raise
        raise ConfigError(
            "--vllm-port needs the package smg-grpc-proto (pip install 'jaxserve[smg]')"
        ) from None
    return vllm_endpoint(readiness)
