"""All addresses that a server listens on: gRPC, AdminService, vLLM's gRPC and HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import grpc
from grpc import aio  # type: ignore[attr-defined]
from prometheus_client.metrics_core import Metric

from jaxserve.addresses import joined
from jaxserve.errors import ConfigError
from jaxserve.server.core.input_bytes import InputBytes
from jaxserve.server.core.limits import Limits
from jaxserve.server.flags import ServeOptions
from jaxserve.server.grpc.admin import AdminServicer
from jaxserve.server.grpc.inference import InferenceServicer
from jaxserve.server.grpc.server import GrpcEndpoint, Health, bind, new_server
from jaxserve.server.http.app import new_app
from jaxserve.server.http.checks import Callers
from jaxserve.server.http.server import HttpServer
from jaxserve.server.observe.profiler import Profiler
from jaxserve.server.options import AddressOptions
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.security.seals import read_seals
from jaxserve.server.security.tls import Tls

ADMIN_PORT = "admin"
NOTICE = 0.5  # seconds for watches of the health service to reach their clients
ANY_TIME = 1e9  # seconds


class Listeners:
    """The gRPC and HTTP servers of a process.

    They answer from the start on, also while the model is loading; Readiness decides what.
    `metrics` and `families` are as in `new_app`.

    Args:
        endpoints: gRPC services on the port of InferenceService.
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
        self.ports: dict[str, int] = {}  # by the name of the protocol
        self._readiness = readiness
        self._limits = limits
        self._inputs = InputBytes(limits.max_input_bytes)
        self._tokens = tokens
        self._metrics = metrics
        self._families = families
        self._endpoints = endpoints
        self._healths: list[Health] = []
        self._grpc: dict[str, aio.Server] = {}  # by the name of the port
        self._closing: list[asyncio.Task[None]] = []
        self._http: HttpServer | None = None
        self._profiler: Profiler | None = None
        self._host = ""

    @property
    def addresses(self) -> str:
        """The addresses in words, once they are bound."""
        return ", ".join(f"{name} {joined(self._host, port)}" for name, port in self.ports.items())

    async def start(
        self,
        options: ServeOptions,
        drain: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Bind all addresses, then listen.

        Args:
            drain: Function that begins to end the server, for AdminService.
            failed: Function called when a server ends by itself.

        Raises:
            ConfigError: A port is taken or a certificate cannot be used.
        """
        addresses = options.addresses
        files = options.credentials
        tls = Tls.of(files.tls_cert, files.tls_key, files.tls_client_ca)
        self._host = addresses.host
        self._profiler = Profiler(options.operation.profile_dir)
        admin = AdminServicer(self._readiness, self._profiler, drain)
        self._bind_grpc(addresses, tls.credentials() if tls else None, admin)
        if addresses.http:
            app = new_app(
                self._readiness,
                self._tokens,
                self._limits,
                self._metrics,
                self._families,
                Callers(
                    frozenset({addresses.host.lower(), *addresses.allowed_hosts}),
                    addresses.allowed_origins,
                ),
                self._inputs,
                read_seals(files.state_key_file),
            )
            self._http = HttpServer(app, addresses.host, addresses.http_port, tls, self._limits)
            self.ports["HTTP"] = self._http.port
        for server in self._grpc.values():
            await server.start()
        if self._http:
            self._http.start(failed)

    def _bind_grpc(
        self,
        addresses: AddressOptions,
        credentials: grpc.ServerCredentials | None,
        admin: AdminServicer,
    ) -> None:
        admin_port = addresses.admin_port
        vllm_endpoints: list[GrpcEndpoint] = []
        if addresses.vllm_port is not None:  # refused without its package before any port is taken
            vllm_endpoints.append(_vllm_endpoint(self._readiness, self._tokens))

        def bind_server(
            name: str,
            flag: str,
            port: int,
            *endpoints: GrpcEndpoint,
            inference: InferenceServicer | None = None,
            admin: AdminServicer | None = None,
        ) -> None:
            health = Health(inference is not None, admin is not None, *endpoints)
            server = new_server(
                self._limits,
                self._tokens,
                health,
                inference,
                admin,
                *endpoints,
                inputs=self._inputs,
            )
            self._grpc[name] = server
            self._healths.append(health)
            self.ports[name] = bind(server, addresses.host, port, credentials, flag)

        bind_server(
            "gRPC",
            "--port",
            addresses.port,
            *self._endpoints,
            inference=InferenceServicer(self._readiness, self._tokens),
            admin=admin if admin_port is None else None,
        )
        if admin_port is not None:
            bind_server(ADMIN_PORT, "--admin-port", admin_port, admin=admin)
        if addresses.vllm_port is not None:
            bind_server("vLLM", "--vllm-port", addresses.vllm_port, *vllm_endpoints)

    def tell(self, phase: Phase) -> None:
        """Report a new phase to health checks."""
        for health in self._healths:
            health.tell(phase)

    @property
    def in_use(self) -> bool:
        """Return whether an HTTP client may be about to send a request.

        gRPC's clients are not asked: once they have been told, they send nothing more.
        """
        return self._http is not None and self._http.in_use

    async def drain(self) -> None:
        """Close all ports but that of AdminService alone, and send clients elsewhere.

        Running calls go on. gRPC's clients get GOAWAY; calls that they send before they read it
        end with CANCELLED and nothing else, unseen by any service. A client that watches the health
        service sends none: it is given time to hear of the drain. HTTP's clients are told with
        their next response.
        """
        if self._http:
            await self._http.close_port()
        if any(health.is_watched for health in self._healths):
            await asyncio.sleep(NOTICE)
        self._closing = [
            asyncio.create_task(server.stop(ANY_TIME))
            for name, server in self._grpc.items()
            if name != ADMIN_PORT
        ]

    async def stop(self, grace: float) -> None:
        """Close all servers; open calls have `grace` seconds to be read to their end."""
        if self._profiler:
            await self._profiler.close()
        for health in self._healths:
            health.close()
        stopping = [server.stop(grace) for server in self._grpc.values()]
        if self._http:
            stopping.append(self._http.stop(grace))
        await asyncio.gather(*stopping, *self._closing)


def _vllm_endpoint(readiness: Readiness, tokens: BearerTokens) -> GrpcEndpoint:
    """Return vLLM's service; ConfigError without the package that has its messages."""
    try:
        from jaxserve.server.grpc.vllm import vllm_endpoint
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "smg_grpc_proto":
            raise
        raise ConfigError(
            "--vllm-port needs the package smg-grpc-proto (pip install 'jaxserve[smg]')"
        ) from None
    return vllm_endpoint(readiness, tokens)
