"""What a server has beside others because of its role."""

import asyncio
from functools import partial

import grpc
from grpc import aio  # type: ignore[attr-defined]
from prometheus_client import CollectorRegistry

from jaxserve.cluster.transfer.byte_budget import Budget
from jaxserve.cluster.transfer.fetch import SERVICE, Receiver, TransferServicer
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.cluster.transfer.offers import Shelf
from jaxserve.cluster.transfer.prefill import PrefillClient, PrefillServicer
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.server.core.engine_thread import EngineThread
from jaxserve.server.disaggregation.addresses import follow
from jaxserve.server.disaggregation.flags import Disaggregation
from jaxserve.server.disaggregation.metrics import DecodeMetrics, PrefillMetrics, ServerMetrics
from jaxserve.server.disaggregation.prefill_pool import PrefillPool, PrefillServer
from jaxserve.server.disaggregation.prefill_source import PrefillSource
from jaxserve.server.disaggregation.remote_prefill import Handover
from jaxserve.server.grpc.server import GrpcEndpoint
from jaxserve.server.readiness import Readiness

PREFILL = pb.DESCRIPTOR.services_by_name["PrefillService"].full_name
# To each prefill server a connection of its own, which is found dead within seconds, and again
# within two.
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # the environment's is for the way out
)


class Role:
    """Of a server that computes its own prompts, and nobody else's: nothing. Lives on the event
    loop.
    """

    introduction = ""  # for whoever starts the server
    endpoints: tuple[GrpcEndpoint, ...] = ()  # beside InferenceService
    for_servers = False  # and not for clients

    @property
    def leaving(self) -> int:
        """Prompts of other servers whose pages were not all fetched; their requests may have
        ended."""
        return 0

    def handover(self, thread: EngineThread, page_size: int) -> Handover | None:
        """For the engine of this thread, with pages of so many tokens."""
        return None

    def open(self, handshake: Handshake | None) -> None:
        """The engine's steps are compiled. handshake: of one that exchanges pages."""

    async def close(self) -> None: ...


class PrefillRole(Role):
    """It computes prompts for decode servers, and refuses clients."""

    introduction = "prefill: it computes prompts for decode servers, and refuses clients"
    for_servers = True

    def __init__(self, plan: Disaggregation, readiness: Readiness, registry: CollectorRegistry):
        self._source, self.shelf = PrefillSource(readiness), Shelf(plan.buffer)
        self._servicer = servicer = PrefillServicer(self._source, self.shelf, plan.seconds)
        PrefillMetrics(registry, self.shelf)

        def add(server: aio.Server) -> None:
            rpc.add_PrefillServiceServicer_to_server(servicer, server)

        self.endpoints = (
            GrpcEndpoint(PREFILL, add),
            GrpcEndpoint(SERVICE, TransferServicer(self.shelf).add_to),
        )

    @property
    def leaving(self) -> int:
        return self._servicer.open

    async def close(self) -> None:
        self._source.close()


class DecodeRole(Role):
    """It hands long prompts over to prefill servers."""

    def __init__(self, plan: Disaggregation, registry: CollectorRegistry):
        self._plan = plan
        self._budget, self._pool = Budget(plan.buffer), PrefillPool(plan.seconds)
        self._metrics = DecodeMetrics(registry)
        ServerMetrics(registry, self._budget, lambda: self._pool.states)
        self._following: asyncio.Task[None] | None = None
        whom = [*plan.servers, *([f"those in {plan.servers_file}"] if plan.servers_file else [])]
        self.introduction = (
            f"decode: prompts with {plan.policy.threshold} uncached tokens or "
            f"more are computed by {', '.join(whom)}"
        )

    def handover(self, thread: EngineThread, page_size: int) -> Handover:
        plan = self._plan
        return Handover(thread, page_size, self._pool, plan.policy, plan.seconds, self._metrics)

    def open(self, handshake: Handshake | None) -> None:
        assert handshake, "a decode server's engine exchanges pages"
        fixed, connect = self._plan.servers, partial(self._connect, handshake)
        if path := self._plan.servers_file:
            change = partial(self._pool.change, connect)
            self._following = asyncio.create_task(
                follow(path, lambda found: change([*fixed, *found]))
            )
        else:
            self._pool.change(connect, fixed)

    def _connect(self, handshake: Handshake, address: str) -> PrefillServer:
        plan = self._plan
        metadata = (("authorization", f"Bearer {plan.token}"),) if plan.token else ()
        if plan.ca:
            credentials = grpc.ssl_channel_credentials(plan.ca, plan.key, plan.certificate)
            channel = aio.secure_channel(address, credentials, OPTIONS)
        else:
            channel = aio.insecure_channel(address, OPTIONS)
        receiver = Receiver(channel, self._budget, metadata)
        return PrefillServer(
            address, channel, PrefillClient(channel, receiver, handshake, metadata)
        )

    async def close(self) -> None:
        if self._following:
            self._following.cancel()
        await self._pool.close()


def role_of(plan: Disaggregation | None, readiness: Readiness, registry: CollectorRegistry) -> Role:
    """registry: of the server's metrics."""
    if plan is None:
        return Role()
    return PrefillRole(plan, readiness, registry) if plan.prefills else DecodeRole(plan, registry)
