"""Fetch segments over gRPC: one call for each, on the connections that the servers have anyway.

HTTP/2's flow control bounds the memory of a transfer: a receiver reads no faster than it can, and a
few MiB later the sender's writes wait.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from grpc import aio  # type: ignore[attr-defined]

from jaxserve.cluster.transfer.byte_budget import ByteBudget
from jaxserve.cluster.transfer.encoding import SegmentBuffer, chunks, data_of, message_of
from jaxserve.cluster.transfer.grpc_status import errors_to_status, status_to_errors
from jaxserve.cluster.transfer.offers import Offer, OfferStore
from jaxserve.cluster.transfer.ticket import Ticket, TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.engine.kv_segment import KVSegment

SERVICE = pb.DESCRIPTOR.services_by_name["TransferService"].full_name
Metadata = tuple[tuple[str, str], ...]


class TransferServicer:
    """The sending side. Its bytes do not pass through protobuf, see `message_of`."""

    def __init__(self, offers: OfferStore):
        self._offers = offers

    def add_to(self, server: aio.Server) -> None:
        # Without a response serializer, `write` takes bytes as they are.
        fetch = grpc.unary_stream_rpc_method_handler(self.Fetch, pb.FetchRequest.FromString)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Fetch": fetch}),)
        )

    async def Fetch(self, request: pb.FetchRequest, context: aio.ServicerContext) -> None:
        async with errors_to_status(context):
            await self._take(request.ticket, context)

    # A function of its own, so that its frame, which holds the offer, is not that of the handler:
    # `errors_to_status` can clear only frames that have ended.
    async def _take(self, ticket: bytes, context: aio.ServicerContext) -> None:
        with self._offers.taking(ticket) as offer:
            await self._send(offer, context)

    async def _send(self, offer: Offer, context: aio.ServicerContext) -> None:
        try:
            async with asyncio.timeout_at(offer.deadline):
                for data in chunks(offer.segment):
                    await context.write(message_of(data))
        except TimeoutError:
            raise TransferError(
                "DEADLINE_EXCEEDED", "the piece was not read in time (--transfer-timeout)"
            ) from None


class SegmentReceiver:
    """The receiving side, for one sender.

    The budget may be shared among several. `metadata` is sent with every call.
    """

    def __init__(self, channel: aio.Channel, budget: ByteBudget, metadata: Metadata = ()):
        # Without a response deserializer, `read` returns bytes as they are.
        self._fetching = channel.unary_stream(
            f"/{SERVICE}/Fetch", pb.FetchRequest.SerializeToString
        )
        self._budget = budget
        self._metadata = metadata

    @asynccontextmanager
    async def fetch(self, ticket: Ticket, deadline: float) -> AsyncIterator[KVSegment]:
        """Fetch a segment, whose bytes count against the budget until the block is left.

        TransferError when it did not come by the deadline.
        """
        async with self._budget.hold(ticket.nbytes, deadline):
            yield await self._fetch(ticket, deadline)

    async def _fetch(self, ticket: Ticket, deadline: float) -> KVSegment:
        buffer = SegmentBuffer(ticket)
        seconds = deadline - asyncio.get_running_loop().time()
        call = self._fetching(
            pb.FetchRequest(ticket=ticket.key), timeout=max(seconds, 0), metadata=self._metadata
        )
        with status_to_errors(call):
            while (message := await call.read()) is not aio.EOF:
                buffer.fill(data_of(message))
        return buffer.segment()
