"""Pieces by jax.experimental.transfer. It is told of a piece only while a receiver is there that pulls it.

    receiver    Pull(ticket) -->                                      sender    takes it off the shelf, offers it to jax
                <-- address, uuids
                pulls <== jax.experimental.transfer ==>
                pulled -->                                                      forgets it

So a piece that nobody asks for never gets there, and a shelf's budget, deadlines and counts hold for it as for others.
Only where that call ends before its last message there is an offer left, which the sender drains.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from grpc import aio  # type: ignore[attr-defined]

from jaxserve.cluster.transfer.byte_budget import Budget
from jaxserve.cluster.transfer.encoding import piece_of
from jaxserve.cluster.transfer.grpc_status import answering, reading
from jaxserve.cluster.transfer.grpc_transport import Metadata
from jaxserve.cluster.transfer.jax_transfer import JaxTransfer
from jaxserve.cluster.transfer.leftovers import Leftovers
from jaxserve.cluster.transfer.offers import Lot, Shelf
from jaxserve.cluster.transfer.transport import Ticket, TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.engine.kv_segment import Piece

DRAINING = 5.0  # seconds that it may take
STUCK = 8  # pulls from one sender


class JaxServicer(rpc.TransferServiceServicer):
    """The sender's side. A piece is in memory twice while it is pulled, and has room for once.

    draining: what broke off; a stuck one says that some receiver stalls, and everybody waits for it. drained: how many.
    """

    def __init__(self, shelf: Shelf, transfer: JaxTransfer):
        self.draining, self.drained = Leftovers(shelf.budget), 0
        self._shelf, self._transfer = shelf, transfer

    async def Pull(self, requests: AsyncIterator[pb.PullRequest], context: aio.ServicerContext) -> None:
        async with answering(context):
            if stuck := self.draining.stuck:
                problem = f"a receiver stalls, and with it jax.experimental.transfer ({stuck} pieces are not drained)"
                raise TransferError("UNAVAILABLE", f"{problem}: nothing is sent until it goes on or ends")
            await self._take((await _next(context)).ticket, context)

    async def _take(self, ticket: bytes, context: aio.ServicerContext) -> None:
        with self._shelf.taking(ticket) as lot:
            await self._lend(lot, context)

    async def _lend(self, lot: Lot, context: aio.ServicerContext) -> None:
        arrays = await self._transfer.put(list(lot.piece.arrays.values()))
        uuids = self._transfer.offer(arrays)
        try:
            async with asyncio.timeout_at(lot.deadline):
                await context.write(pb.PullResponse(address=self._transfer.address, uuids=uuids))
                await _next(context)
        except BaseException as error:
            self._take_back(uuids, lot.piece.nbytes)
            if isinstance(error, TimeoutError):
                problem = "the piece was not pulled in time (--transfer-timeout)"
                raise TransferError("DEADLINE_EXCEEDED", problem) from None
            raise

    def _take_back(self, uuids: Sequence[int], nbytes: int) -> None:
        draining = asyncio.create_task(self._drain(uuids))
        self.draining.add(draining, nbytes, asyncio.get_running_loop().time() + DRAINING)

    async def _drain(self, uuids: Sequence[int]) -> None:
        await self._transfer.drain(uuids)
        self.drained += 1


async def _next(context: aio.ServicerContext) -> pb.PullRequest:
    message = await context.read()
    if message is aio.EOF:
        raise TransferError("CANCELLED", "the receiver left before it had the piece")
    return message


class JaxReceiver:
    """The receiver's side, for one sender. budget: may be shared among several. metadata: of every call.

    left: fetches that were given up and go on, for nobody can end a pull. They keep their room, and once 8 of them are
    stuck, nothing more is fetched until one ends.
    """

    def __init__(self, channel: aio.Channel, budget: Budget, transfer: JaxTransfer, metadata: Metadata = ()):
        self.left = Leftovers(budget)
        self._stub = rpc.TransferServiceStub(channel)
        self._budget, self._transfer, self._metadata = budget, transfer, metadata

    @asynccontextmanager
    async def fetch(self, ticket: Ticket, deadline: float) -> AsyncIterator[Piece]:
        if self.left.stuck >= STUCK:
            problem = f"{self.left.stuck} pulls from that server neither come nor fail (jax.experimental.transfer)"
            raise TransferError("UNAVAILABLE", f"{problem}: nothing is fetched from it until one does", remote=True)
        async with self._budget.hold(ticket.nbytes, deadline):
            yield await self._fetch_or_leave(ticket, deadline)

    async def _fetch_or_leave(self, ticket: Ticket, deadline: float) -> Piece:
        fetching = asyncio.create_task(self._fetch(ticket, deadline))
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(fetching)
        except TimeoutError:
            raise TransferError("DEADLINE_EXCEEDED", "a piece was not there in time (--transfer-timeout)") from None
        finally:
            if not fetching.done():
                self.left.add(fetching, ticket.nbytes, deadline)

    async def _fetch(self, ticket: Ticket, deadline: float) -> Piece:
        seconds = deadline - asyncio.get_running_loop().time()
        call = self._stub.Pull(timeout=max(seconds, 0), metadata=self._metadata)
        with reading(call):
            async with asyncio.timeout_at(deadline):  # gRPC's do not end a write to a channel that is being closed
                await call.write(pb.PullRequest(ticket=ticket.key))
                response = await call.read()
            if response is aio.EOF:
                raise TransferError("DATA_LOSS", "the sender does not say where the piece is")
            piece = await self._pull(response, ticket)
            if not call.done():  # else reading it says why
                await call.write(pb.PullRequest(pulled=True))
            await call.read()  # until the sender has forgotten it
        return piece

    async def _pull(self, response: pb.PullResponse, ticket: Ticket) -> Piece:
        try:
            connection = self._transfer.connect(response.address)
            return piece_of(ticket, await self._transfer.pull(connection, response.uuids, ticket.arrays))
        except TransferError:
            self._transfer.disconnect(response.address)
            raise
