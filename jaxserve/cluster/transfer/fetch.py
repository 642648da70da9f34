"""Pieces over gRPC: one call for each, in the connections that servers have anyway.

HTTP/2's flow control is what a receiver holds a sender back with: it reads no faster than it can,
and a few MiB on, the sender's writes wait.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from grpc import aio  # type: ignore[attr-defined]

from jaxserve.cluster.transfer.byte_budget import Budget
from jaxserve.cluster.transfer.encoding import Blank, chunks, data_of, message_of
from jaxserve.cluster.transfer.grpc_status import answering, reading
from jaxserve.cluster.transfer.offers import Lot, Shelf
from jaxserve.cluster.transfer.ticket import Ticket, TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.engine.kv_segment import KVSegment

SERVICE = pb.DESCRIPTOR.services_by_name["TransferService"].full_name
Metadata = tuple[tuple[str, str], ...]


class TransferServicer:
    """The sender's side. Its bytes do not go through protobuf, see `message_of`."""

    def __init__(self, shelf: Shelf):
        self._shelf = shelf

    def add_to(self, server: aio.Server) -> None:
        fetch = grpc.unary_stream_rpc_method_handler(self.Fetch, pb.FetchRequest.FromString)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Fetch": fetch}),)
        )

    async def Fetch(self, request: pb.FetchRequest, context: aio.ServicerContext) -> None:
        async with answering(context):
            await self._take(request.ticket, context)

    async def _take(self, ticket: bytes, context: aio.ServicerContext) -> None:
        with self._shelf.taking(ticket) as lot:
            await self._send(lot, context)

    async def _send(self, lot: Lot, context: aio.ServicerContext) -> None:
        try:
            async with asyncio.timeout_at(lot.deadline):
                for data in chunks(lot.piece):
                    await context.write(message_of(data))
        except TimeoutError:
            raise TransferError(
                "DEADLINE_EXCEEDED", "the piece was not read in time (--transfer-timeout)"
            ) from None


class Receiver:
    """The receiver's side, for one sender.

    budget: may be shared among several. metadata: of every call.
    """

    def __init__(self, channel: aio.Channel, budget: Budget, metadata: Metadata = ()):
        self._fetching = channel.unary_stream(
            f"/{SERVICE}/Fetch", pb.FetchRequest.SerializeToString
        )
        self._budget, self._metadata = budget, metadata

    @asynccontextmanager
    async def fetch(self, ticket: Ticket, deadline: float) -> AsyncIterator[KVSegment]:
        """The piece takes up room until the block is left.

        TransferError when it did not come by the deadline.
        """
        async with self._budget.hold(ticket.nbytes, deadline):
            yield await self._fetch(ticket, deadline)

    async def _fetch(self, ticket: Ticket, deadline: float) -> KVSegment:
        blank, seconds = Blank(ticket), deadline - asyncio.get_running_loop().time()
        call = self._fetching(
            pb.FetchRequest(ticket=ticket.key), timeout=max(seconds, 0), metadata=self._metadata
        )
        with reading(call):
            while (message := await call.read()) is not aio.EOF:
                blank.fill(data_of(message))
        return blank.piece()
