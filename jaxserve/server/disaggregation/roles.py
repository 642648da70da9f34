"""Roles of a server: what it runs beside its own requests for --role both, prefill or decode."""

import asyncio
from collections.abc import Iterable
from functools import partial

import grpc
from grpc import aio  # type: ignore[attr-defined]
from prometheus_client import CollectorRegistry

from jaxserve.cluster.transfer.byte_budget import ByteBudget
from jaxserve.cluster.transfer.fetch import SERVICE, SegmentReceiver, TransferServicer
from jaxserve.cluster.transfer.handshake import Handshake
from jaxserve.cluster.transfer.offers import OfferStore
from jaxserve.cluster.transfer.prefill import PrefillClient, PrefillServicer
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.server.disaggregation.addresses import follow
from jaxserve.server.disaggregation.flags import Disaggregation
from jaxserve.server.disaggregation.metrics import DecodeMetrics, PrefillMetrics, ServerMetrics
from jaxserve.server.disaggregation.prefill_pool import PrefillPool, PrefillServer
from jaxserve.server.disaggregation.prefill_source import PrefillSource
from jaxserve.server.disaggregation.remote_prefill import RemotePrefill
from jaxserve.server.grpc.server import GrpcEndpoint
from jaxserve.server.readiness import Readiness

PREFILL = pb.DESCRIPTOR.services_by_name["PrefillService"].full_name
# Each prefill server has a connection of its own, so that a lost one is noticed and replaced alone:
# it is found dead after 10 + 5 s without an answer, and tried again at least every 2 s.
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
    ("grpc.enable_http_proxy", 0),  # a proxy of the environment is for the internet
)


class Role:
    """A server that computes its own prompts only; the base of the other roles.

    Lives on the event loop. `introduction` describes the role for the terminal. `endpoints` are
    gRPC services in addition to InferenceService. `for_servers` says that only other servers are
    served, not clients.
    """

    introduction = ""
    endpoints: tuple[GrpcEndpoint, ...] = ()
    for_servers = False

    @property
    def exports_in_flight(self) -> int:
        """Prompts of other servers whose pages were not all fetched.

        Their requests may have ended already, so a drain has to wait for these as well.
        """
        return 0

    def remote_prefill(self, thread: EngineThread, page_size: int) -> RemotePrefill | None:
        """Return the remote prefill for an engine with pages of `page_size` tokens, if any."""
        return None

    def open(self, handshake: Handshake | None) -> None:
        """Start the role's work; called once, when the engine's steps are compiled.

        Args:
            handshake: Handshake of the engine; None if it exchanges no pages.
        """

    async def close(self) -> None: ...


class PrefillRole(Role):
    """A server that computes prompts for decode servers, and refuses clients."""

    introduction = "prefill: it computes prompts for decode servers, and refuses clients"
    for_servers = True

    def __init__(self, plan: Disaggregation, readiness: Readiness, registry: CollectorRegistry):
        self._source = PrefillSource(readiness)
        self.offers = OfferStore(plan.buffer)
        self._servicer = PrefillServicer(self._source, self.offers, plan.seconds)
        PrefillMetrics(registry, self.offers)
        add = partial(rpc.add_PrefillServiceServicer_to_server, self._servicer)
        self.endpoints = (
            GrpcEndpoint(PREFILL, add),
            GrpcEndpoint(SERVICE, TransferServicer(self.offers).add_to),
        )

    @property
    def exports_in_flight(self) -> int:
        return self._servicer.open_prompts

    async def close(self) -> None:
        self._source.close()


class DecodeRole(Role):
    """A server that has long prompts computed by prefill servers."""

    def __init__(self, plan: Disaggregation, registry: CollectorRegistry):
        self._plan = plan
        self._budget = ByteBudget(plan.buffer)
        self._pool = PrefillPool(plan.seconds)
        self._metrics = DecodeMetrics(registry)
        ServerMetrics(registry, self._budget, lambda: self._pool.states)
        self._following: asyncio.Task[None] | None = None
        servers = [*plan.servers]
        if plan.servers_file:
            servers.append(f"those in {plan.servers_file}")
        self.introduction = (
            f"decode: prompts with {plan.policy.threshold} uncached tokens or "
            f"more are computed by {', '.join(servers)}"
        )

    def remote_prefill(self, thread: EngineThread, page_size: int) -> RemotePrefill:
        plan = self._plan
        return RemotePrefill(
            thread, page_size, self._pool, plan.policy, plan.seconds, self._metrics
        )

    def open(self, handshake: Handshake | None) -> None:
        assert handshake, "a decode server's engine exchanges pages"
        connect = partial(self._connect, handshake)
        fixed = self._plan.servers
        path = self._plan.servers_file
        if path is None:
            self._pool.change(connect, fixed)
            return

        def change(found: Iterable[str]) -> None:
            self._pool.change(connect, [*fixed, *found])

        self._following = asyncio.create_task(follow(path, change))

    def _connect(self, handshake: Handshake, address: str) -> PrefillServer:
        plan = self._plan
        metadata = (("authorization", f"Bearer {plan.token}"),) if plan.token else ()
        if plan.ca:
            credentials = grpc.ssl_channel_credentials(plan.ca, plan.key, plan.certificate)
            channel = aio.secure_channel(address, credentials, OPTIONS)
        else:
            channel = aio.insecure_channel(address, OPTIONS)
        receiver = SegmentReceiver(channel, self._budget, metadata)
        client = PrefillClient(channel, receiver, handshake, metadata)
        return PrefillServer(address, channel, client)

    async def close(self) -> None:
        if self._following:
            self._following.cancel()
        await self._pool.close()


def role_of(plan: Disaggregation | None, readiness: Readiness, registry: CollectorRegistry) -> Role:
    """Return the role for a plan; None is --role both. Its metrics go to the registry."""
    if plan is None:
        return Role()
    if plan.prefills:
        return PrefillRole(plan, readiness, registry)
    return DecodeRole(plan, registry)
