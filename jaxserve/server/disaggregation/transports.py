"""By what pieces travel, --transport: what either side has for it."""

from typing import Protocol
from weakref import WeakSet

from grpc import aio  # type: ignore[attr-defined]
from prometheus_client import CollectorRegistry

from jaxserve.cluster.transfer.byte_budget import Budget
from jaxserve.cluster.transfer.grpc_transport import SERVICE, GrpcReceiver, Metadata, TransferServicer
from jaxserve.cluster.transfer.jax_transfer import JaxTransfer
from jaxserve.cluster.transfer.jax_transport import JaxReceiver, JaxServicer
from jaxserve.cluster.transfer.offers import Shelf
from jaxserve.cluster.transfer.transport import Receiver
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.server.disaggregation.metrics import JaxMetrics
from jaxserve.server.grpc.server import Face


class Transport(Protocol):
    def face(self, shelf: Shelf) -> Face:
        """Of whoever sends what lies on the shelf."""
        ...

    def receiver(self, channel: aio.Channel, budget: Budget, metadata: Metadata) -> Receiver:
        """Of whoever fetches it. metadata: of every call."""
        ...


class ByGrpc:
    def face(self, shelf: Shelf) -> Face:
        return Face(SERVICE, TransferServicer(shelf).add_to)

    def receiver(self, channel: aio.Channel, budget: Budget, metadata: Metadata) -> Receiver:
        return GrpcReceiver(channel, budget, metadata)


class ByJax:
    """jax.experimental.transfer, one of it in a process, with metrics of what it cannot be rid of."""

    def __init__(self, host: str, registry: CollectorRegistry):
        """See JaxTransfer."""
        self._transfer = JaxTransfer(host)
        self._servicers, self._receivers = WeakSet[JaxServicer](), WeakSet[JaxReceiver]()
        JaxMetrics(registry, self._stuck, lambda: sum(servicer.drained for servicer in self._servicers))

    def _stuck(self) -> int:
        sent = sum(servicer.draining.stuck for servicer in self._servicers)
        return sent + sum(receiver.left.stuck for receiver in self._receivers)

    def face(self, shelf: Shelf) -> Face:
        servicer = JaxServicer(shelf, self._transfer)
        self._servicers.add(servicer)
        return Face(SERVICE, lambda server: rpc.add_TransferServiceServicer_to_server(servicer, server))

    def receiver(self, channel: aio.Channel, budget: Budget, metadata: Metadata) -> Receiver:
        receiver = JaxReceiver(channel, budget, self._transfer, metadata)
        self._receivers.add(receiver)
        return receiver


def transport_of(name: str, host: str, registry: CollectorRegistry) -> Transport:
    """name: as --transport has it. host: the number by which others reach this one. ConfigError as of JaxTransfer."""
    return ByJax(host, registry) if name == "jax" else ByGrpc()
