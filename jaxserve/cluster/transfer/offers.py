"""Segments on offer: in the host's memory until they are fetched, within a budget and a time."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from jaxserve.cluster.transfer.byte_budget import ByteBudget
from jaxserve.cluster.transfer.ticket import Ticket, TransferError
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import EngineError

KEY_BYTES = 16


@dataclass
class Counts:
    """Numbers of segments by what became of them; `bytes` counts those that were fetched."""

    offered: int = 0
    fetched: int = 0
    broken: int = 0  # the fetch was broken off
    expired: int = 0  # not fetched by their deadline
    withdrawn: int = 0  # by the end of the call that they were offered in
    bytes: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Offer:
    """A segment on offer; the future says, once the offer is gone, whether it was fetched."""

    segment: KVSegment
    deadline: float
    fetched: asyncio.Future[bool]


class OfferStore:
    """Every segment on offer, each for the first caller that has its key.

    Args:
        nbytes: The most bytes that are held, the value of --transfer-buffer.
    """

    def __init__(self, nbytes: int):
        self.budget = ByteBudget(nbytes, "of the prefill server")
        self.counts = Counts()
        self._offers: dict[bytes, Offer] = {}
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self._taken: set[Offer] = set()  # being fetched

    @asynccontextmanager
    async def offering(self) -> AsyncIterator["PromptOffers"]:
        """Open the offers of one prompt; the block's end withdraws those that were not fetched."""
        offers = PromptOffers(self)
        try:
            yield offers
        finally:
            for key in offers.keys:
                if offer := self._remove(key):
                    self.counts.withdrawn += 1
                    self._settle(offer, False)

    async def put(self, segment: KVSegment, deadline: float) -> tuple[Ticket, asyncio.Future[bool]]:
        """Wait for room, then offer the segment until the deadline.

        The future says, once the offer is gone, whether it was fetched.
        """
        await self.budget.take(segment.nbytes, deadline)
        loop = asyncio.get_running_loop()
        key = secrets.token_bytes(KEY_BYTES)
        offer = Offer(segment, deadline, loop.create_future())
        self._offers[key] = offer
        self._timers[key] = loop.call_at(deadline, self._expire, key)
        self.counts.offered += 1
        return Ticket.of(key, segment), offer.fetched

    @contextmanager
    def taking(self, key: bytes) -> Iterator[Offer]:
        """Take an offer for the block, after which it is gone; an exception says it was broken off.

        TransferError NOT_FOUND for a key that is unknown, used or expired.
        """
        offer = self._remove(key)
        if offer is None:
            raise TransferError(
                "NOT_FOUND",
                "no piece is on offer under this ticket: it was used, or its time is over",
            )
        self._taken.add(offer)
        fetched = False
        try:
            yield offer
            fetched = True
        finally:
            self._taken.discard(offer)
            if fetched:
                self.counts.fetched += 1
                self.counts.bytes += offer.segment.nbytes
            else:
                self.counts.broken += 1
            self._settle(offer, fetched)

    def _expire(self, key: bytes) -> None:
        if offer := self._remove(key):
            self.counts.expired += 1
            self._settle(offer, False)

    def _remove(self, key: bytes) -> Offer | None:
        if timer := self._timers.pop(key, None):
            timer.cancel()
        return self._offers.pop(key, None)

    def _settle(self, offer: Offer, fetched: bool) -> None:
        self.budget.give(offer.segment.nbytes)
        offer.fetched.set_result(fetched)

    def check_invariants(self) -> None:
        """Check that every segment here has its bytes, and every one offered is here or counted.

        EngineError with the numbers otherwise.
        """
        here = [*self._offers.values(), *self._taken]
        nbytes = sum(offer.segment.nbytes for offer in here)
        # More may be held than is here: `put` takes bytes a moment before it lays the offer out.
        if self.budget.held < nbytes or self._timers.keys() != self._offers.keys():
            raise EngineError(
                f"{self.budget.held} bytes are held for {len(here)} pieces of {nbytes} bytes"
            )
        counts = self.counts
        gone = counts.fetched + counts.broken + counts.expired + counts.withdrawn
        if gone + len(here) != counts.offered:
            raise EngineError(
                f"{counts.offered} pieces were offered, {gone} are gone and {len(here)} are here"
            )


class PromptOffers:
    """The offers of one prompt, by key and outcome; the segments themselves are the store's."""

    def __init__(self, store: OfferStore):
        self._store = store
        self._outcomes: dict[bytes, asyncio.Future[bool]] = {}

    @property
    def keys(self) -> Iterable[bytes]:
        return self._outcomes

    async def offer(self, segment: KVSegment, deadline: float) -> Ticket:
        """Wait for room, and let the segment be fetched until the deadline.

        TransferError: RESOURCE_EXHAUSTED where there is no room by then, or never;
        DEADLINE_EXCEEDED where an earlier segment was not fetched, so that later ones are of no
        use.
        """
        for outcome in self._outcomes.values():
            if outcome.done():
                _check(outcome.result())
        ticket, outcome = await self._store.put(segment, deadline)
        self._outcomes[ticket.key] = outcome
        return ticket

    async def fetched(self) -> None:
        """Wait until all segments are fetched; TransferError when one will not be."""
        for outcome in self._outcomes.values():
            # Shielded: cancelling this task must not cancel the store's future.
            _check(await asyncio.shield(outcome))


def _check(fetched: bool) -> None:
    if not fetched:
        raise TransferError(
            "DEADLINE_EXCEEDED", "a piece was not fetched, or not in time (--transfer-timeout)"
        )
