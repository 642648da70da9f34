"""Pieces on offer: in the host's memory until they are fetched, within a budget and only so
long."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from jaxserve.cluster.transfer.byte_budget import Budget
from jaxserve.cluster.transfer.ticket import Ticket, TransferError
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import EngineError

KEY_BYTES = 16


@dataclass
class Counts:
    """What became of the pieces that were offered; bytes: of those that were fetched."""

    offered: int = 0
    fetched: int = 0
    broken: int = 0  # off, while they were fetched
    expired: int = 0  # not fetched by their deadline
    withdrawn: int = 0  # by the end of the call that they were offered in
    bytes: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Lot:
    """A piece that is here. fetched: whether it was, once it is gone."""

    piece: KVSegment
    deadline: float
    fetched: asyncio.Future[bool]


class Shelf:
    """Pieces that anybody may take who shows a ticket."""

    def __init__(self, nbytes: int):
        """nbytes: that may be held, --transfer-buffer."""
        self.budget = Budget(nbytes, "of the prefill server")
        self.counts = Counts()
        self._lots: dict[bytes, Lot] = {}
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self._taken: set[Lot] = set()

    @asynccontextmanager
    async def offering(self) -> AsyncIterator["Offering"]:
        """Leaving the block takes back what nobody fetched."""
        offering = Offering(self)
        try:
            yield offering
        finally:
            for key in offering.keys:
                if lot := self._remove(key):
                    self.counts.withdrawn += 1
                    self._settle(lot, False)

    async def put(self, piece: KVSegment, deadline: float) -> tuple[Ticket, asyncio.Future[bool]]:
        """Wait for room, then lay it out. The future says whether it was fetched, once it is
        gone."""
        await self.budget.take(piece.nbytes, deadline)
        loop, key = asyncio.get_running_loop(), secrets.token_bytes(KEY_BYTES)
        lot = self._lots[key] = Lot(piece, deadline, loop.create_future())
        self._timers[key] = loop.call_at(deadline, self._expire, key)
        self.counts.offered += 1
        return Ticket.of(key, piece), lot.fetched

    @contextmanager
    def taking(self, key: bytes) -> Iterator[Lot]:
        """Off the shelf at once, and gone when the block ends. TransferError NOT_FOUND for a key
        that is not good.
        """
        lot = self._remove(key)
        if lot is None:
            raise TransferError(
                "NOT_FOUND",
                "no piece is on offer under this ticket: it was used, or its time is over",
            )
        self._taken.add(lot)
        fetched = False
        try:
            yield lot
            fetched = True
        finally:
            self._taken.discard(lot)
            self.counts.fetched += fetched
            self.counts.broken += not fetched
            self.counts.bytes += fetched * lot.piece.nbytes
            self._settle(lot, fetched)

    def _expire(self, key: bytes) -> None:
        if lot := self._remove(key):
            self.counts.expired += 1
            self._settle(lot, False)

    def _remove(self, key: bytes) -> Lot | None:
        if timer := self._timers.pop(key, None):
            timer.cancel()
        return self._lots.pop(key, None)

    def _settle(self, lot: Lot, fetched: bool) -> None:
        self.budget.give(lot.piece.nbytes)
        lot.fetched.set_result(fetched)

    def check_invariants(self) -> None:
        """What is here has its room, and every piece that was offered is here or gone. EngineError
        with the numbers.
        """
        here, c = [*self._lots.values(), *self._taken], self.counts
        nbytes = sum(lot.piece.nbytes for lot in here)
        if self.budget.held < nbytes or self._timers.keys() != self._lots.keys():
            raise EngineError(
                f"{self.budget.held} bytes are held for {len(here)} pieces of {nbytes} bytes"
            )
        gone = c.fetched + c.broken + c.expired + c.withdrawn
        if gone + len(here) != c.offered:
            raise EngineError(
                f"{c.offered} pieces were offered, {gone} are gone and {len(here)} are here"
            )


class Offering:
    """The pieces of one prompt. It keeps none of them alive: they are the shelf's."""

    def __init__(self, shelf: Shelf):
        self._shelf = shelf
        self._offers: dict[bytes, asyncio.Future[bool]] = {}

    @property
    def keys(self) -> Iterable[bytes]:
        return self._offers

    async def offer(self, piece: KVSegment, deadline: float) -> Ticket:
        """Wait for room, and let the piece be fetched until the deadline.

        TransferError: RESOURCE_EXHAUSTED where there is no room by then, or never;
        DEADLINE_EXCEEDED where an earlier piece was not fetched in time, so that nobody needs
        this one.
        """
        for fetched in self._offers.values():
            _check(not fetched.done() or fetched.result())
        ticket, fetched = await self._shelf.put(piece, deadline)
        self._offers[ticket.key] = fetched
        return ticket

    async def fetched(self) -> None:
        """Wait until all of them are fetched. TransferError when one will not be."""
        for fetched in self._offers.values():
            _check(await asyncio.shield(fetched))


def _check(fetched: bool) -> None:
    if not fetched:
        raise TransferError(
            "DEADLINE_EXCEEDED", "a piece was not fetched, or not in time (--transfer-timeout)"
        )
