"""Offers: limited in bytes, in time, and to the call that they were made in."""

import asyncio
import gc
import random
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from jaxserve.cluster.transfer.byte_budget import ByteBudget
from jaxserve.cluster.transfer.offers import Counts, OfferStore
from jaxserve.cluster.transfer.ticket import Ticket, TransferError
from tests.jaxserve.cluster.transfer.harness import (
    large_segment,
    now,
    pass_time,
    random_segment,
    refusal,
)

Scenario = Callable[[], Awaitable[None]]


def run(scenario: Scenario) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


async def run_pending_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_budget_serves_whoever_came_first() -> None:
    """A small request does not pass a large one that waits."""

    async def scenario() -> None:
        budget = ByteBudget(10)
        order = list[str]()

        async def ask(name: str, nbytes: int) -> None:
            await budget.take(nbytes, now() + 60)
            order.append(name)

        await budget.take(8, now())
        asking = [
            asyncio.create_task(ask(*one)) for one in (("large", 9), ("small", 1), ("other", 1))
        ]
        await run_pending_tasks()
        assert budget.held == 8 and budget.waiting == 3 and not order
        budget.give(8)
        await run_pending_tasks()
        assert order == ["large", "small"] and budget.held == 10 and budget.waiting == 1
        budget.give(10)
        await asyncio.gather(*asking)
        assert order == ["large", "small", "other"] and budget.held == 1

    run(scenario)


def test_who_gives_up_lets_the_next_one_in() -> None:
    async def scenario() -> None:
        budget = ByteBudget(10)
        await budget.take(8, now())
        first = asyncio.create_task(budget.take(9, now() + 60))
        second = asyncio.create_task(budget.take(2, now() + 60))
        await run_pending_tasks()
        first.cancel()
        await second
        assert first.cancelled() and budget.held == 10 and not budget.waiting

    run(scenario)


def test_room_that_is_granted_to_somebody_who_just_gave_up_is_given_back() -> None:
    async def scenario() -> None:
        budget = ByteBudget(10)
        await budget.take(10, now())
        waiting = asyncio.create_task(budget.take(10, now() + 60))
        await run_pending_tasks()
        budget.give(10)  # granted, and cancelled before it runs again
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        assert budget.held == 0 and not budget.waiting

    run(scenario)


def test_no_room_by_the_deadline() -> None:
    async def scenario() -> None:
        budget = ByteBudget(10)
        async with budget.hold(7, now()):
            late = await refusal(budget.take(4, now() + 0.02))
            assert (late.code, str(late)) == (
                "RESOURCE_EXHAUSTED",
                "no room for 4 bytes in time: 7 of 10 (--transfer-buffer of the decode server) "
                "are held",
            )
            never = await refusal(budget.take(11, now() + 99))
            assert (
                never.code == "RESOURCE_EXHAUSTED"
                and "larger --transfer-buffer of the decode server (now 10 bytes)" in str(never)
            )
        assert budget.held == 0 and not budget.waiting

    run(scenario)


def test_a_ticket_is_good_once() -> None:
    async def scenario() -> None:
        offers = OfferStore(1000)
        piece = random_segment(1)
        async with offers.offering() as offering:
            ticket = await offering.offer(piece, now() + 60)
            assert ticket == Ticket.of(ticket.key, piece) and len(ticket.key) == 16
            assert offers.budget.held == piece.nbytes == ticket.nbytes
            with offers.taking(ticket.key) as offer:
                assert offer.segment is piece and offers.budget.held == piece.nbytes
                offers.check_invariants()
                for key in (ticket.key, b"", b"x" * 16):
                    with (
                        pytest.raises(TransferError, match="no piece is on offer") as caught,
                        offers.taking(key),
                    ):
                        pass
                    assert caught.value.code == "NOT_FOUND"
            await offering.fetched()
        assert offers.budget.held == 0
        assert offers.counts == Counts(offered=1, fetched=1, bytes=piece.nbytes)
        offers.check_invariants()

    run(scenario)


def test_what_is_not_fetched_in_time_is_dropped_and_nothing_more_is_offered() -> None:
    async def scenario() -> None:
        offers = OfferStore(1000)
        async with offers.offering() as offering:
            ticket = await offering.offer(random_segment(1), now() + 60)
            waiting = asyncio.create_task(offering.fetched())
            pass_time(60)
            await run_pending_tasks()
            assert offers.budget.held == 0 and offers.counts == Counts(offered=1, expired=1)
            with pytest.raises(TransferError), offers.taking(ticket.key):
                pass
            for work in (
                waiting,
                offering.offer(random_segment(1), now() + 60),
                offering.fetched(),
            ):
                error = await refusal(work)
                assert (error.code, str(error)) == (
                    "DEADLINE_EXCEEDED",
                    "a piece was not fetched, or not in time (--transfer-timeout)",
                )
        offers.check_invariants()

    run(scenario)


def test_the_end_of_the_call_takes_back_what_it_offered_and_nothing_else() -> None:
    async def scenario() -> None:
        offers = OfferStore(10_000)
        async with offers.offering() as other:
            theirs = await other.offer(random_segment(1), now() + 60)
            with pytest.raises(ZeroDivisionError):
                async with offers.offering() as offering:
                    mine = [await offering.offer(random_segment(1), now() + 60) for _ in range(3)]
                    with offers.taking(mine[0].key):
                        pass
                    raise ZeroDivisionError
            assert offers.counts == Counts(offered=4, fetched=1, withdrawn=2, bytes=theirs.nbytes)
            assert offers.budget.held == theirs.nbytes
            with offers.taking(theirs.key):
                pass
        offers.check_invariants()

    run(scenario)


def test_one_that_breaks_off_is_lost() -> None:
    async def scenario() -> None:
        offers = OfferStore(1000)
        async with offers.offering() as offering:
            ticket = await offering.offer(random_segment(1), now() + 60)
            with pytest.raises(ZeroDivisionError), offers.taking(ticket.key):
                raise ZeroDivisionError
            assert (await refusal(offering.fetched())).code == "DEADLINE_EXCEEDED"
        assert offers.budget.held == 0 and offers.counts == Counts(offered=1, broken=1)

    run(scenario)


def test_an_offer_waits_for_room() -> None:
    async def scenario() -> None:
        offers = OfferStore(1000)
        async with offers.offering() as offering:
            first = await offering.offer(large_segment(800), now() + 60)
            second = asyncio.create_task(offering.offer(large_segment(800), now() + 60))
            await run_pending_tasks()
            assert not second.done() and offers.budget.waiting == 1
            with offers.taking(first.key):
                await run_pending_tasks()
                assert not second.done(), "its bytes are still held"
            with offers.taking((await second).key):
                pass
            await offering.fetched()
        offers.check_invariants()

    run(scenario)


def test_nobody_keeps_a_piece_alive_that_was_fetched() -> None:
    async def scenario() -> None:
        offers = OfferStore(1000)
        piece = large_segment(400)
        watched = weakref.ref(piece.k)
        async with offers.offering() as offering:
            ticket = await offering.offer(piece, now() + 60)
            del piece
            with offers.taking(ticket.key):
                pass
            gc.collect()
            assert watched() is None

    run(scenario)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_the_books_are_right(seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        offers = OfferStore(4000)

        async def call() -> None:
            with suppress(TransferError):
                async with offers.offering() as offering:
                    for _ in range(rng.randrange(5)):
                        ticket = await offering.offer(
                            random_segment(rng.choice((1, 2, 3, 6))), now() + 100 * rng.random()
                        )
                        await asyncio.sleep(10 * rng.random())
                        if rng.random() < 0.7:
                            with offers.taking(ticket.key):
                                await asyncio.sleep(10 * rng.random())
                    await offering.fetched()

        calls = [asyncio.create_task(call()) for _ in range(60)]
        while any(not task.done() for task in calls):
            offers.check_invariants()
            if rng.random() < 0.3:
                rng.choice(calls).cancel()
            pass_time(1)
            await asyncio.sleep(0)
        await asyncio.gather(*calls, return_exceptions=True)
        offers.check_invariants()
        assert offers.budget.held == offers.budget.waiting == 0
        counts = offers.counts
        assert counts.fetched and (counts.expired or counts.withdrawn)

    run(scenario)
