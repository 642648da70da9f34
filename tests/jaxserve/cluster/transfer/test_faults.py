"""Faults of a transfer: each ends within its deadline, is named, and leaves nothing behind."""

import asyncio
import random
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial

import pytest
from grpc import aio

from jaxserve.cluster.transfer import fetch as fetching
from jaxserve.cluster.transfer.encoding import chunks
from jaxserve.cluster.transfer.offers import Counts
from jaxserve.cluster.transfer.prefill import PrefillClient
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.engine.kv_segment import KVSegment
from tests.jaxserve.cluster.transfer.harness import (
    HANDSHAKE,
    MEBI,
    OPTIONS,
    SECONDS,
    Proxy,
    Servers,
    do_nothing,
    equal_segments,
    fetch_all,
    large_segment,
    now,
    pass_time,
    prompt_of,
    random_segment,
    refusal,
    servers,
)


async def wait_forever(number: int) -> None:
    await asyncio.Event().wait()


def prefill(s: Servers) -> aio.UnaryStreamCall:
    """Make the call of a `PrefillClient` by hand."""
    request = pb.PrefillRequest(token_ids=[1], page_size=4, **HANDSHAKE.fields())
    return rpc.PrefillServiceStub(s.channel).Prefill(request, timeout=2 * SECONDS)


def fetch(s: Servers, ticket: bytes) -> aio.UnaryStreamCall:
    return rpc.TransferServiceStub(s.channel).Fetch(
        pb.FetchRequest(ticket=ticket), timeout=2 * SECONDS
    )


@asynccontextmanager
async def behind_a_proxy(s: Servers) -> AsyncIterator[tuple[Proxy, PrefillClient]]:
    async with (
        Proxy.before(s.port) as proxy,
        aio.insecure_channel(f"127.0.0.1:{proxy.port}", OPTIONS) as channel,
    ):
        yield proxy, s.client_over(channel)


# ---- somebody stalls


@pytest.mark.system
def test_an_engine_that_stalls() -> None:
    async def main() -> None:
        async with servers(random_segment()) as s:
            s.source.before = wait_forever
            assert (await refusal(s.fetch_all(0.2))).code == "DEADLINE_EXCEEDED"
            await s.wait_until_idle()

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize("begun", [False, True])
def test_a_network_that_stalls(begun: bool) -> None:
    """The network stalls before or within a segment: no connection is closed, and nothing comes."""

    async def main() -> None:
        async with (
            servers(random_segment(), large_segment(40 * MEBI)) as s,
            behind_a_proxy(s) as (proxy, client),
        ):
            # On a machine that stalls, the deadline may pass before all of that has come.
            work = asyncio.create_task(fetch_all(client, 1.5))
            while not (s.offers.counts.fetched or work.done()):
                await asyncio.sleep(0)
            while begun and not (proxy.received_bytes > 10 * MEBI or work.done()):
                await asyncio.sleep(0)
            proxy.frozen.set()
            assert (await refusal(work)).code == "DEADLINE_EXCEEDED"
            await s.wait_until_idle()

    asyncio.run(main())


@pytest.mark.system
def test_a_receiver_that_stops_reading_is_held_back_and_then_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender sends what connections buffer, and its memory is free after the deadline."""
    sent = [0]

    def counted(piece: KVSegment) -> Iterator[memoryview]:
        for data in chunks(piece):
            yield data
            sent[0] += len(data)

    monkeypatch.setattr(fetching, "chunks", counted)

    async def main() -> None:
        async with servers(large_segment(40 * MEBI)) as s:
            offers = prefill(s)
            stalled = fetch(s, (await offers.read()).ticket)
            assert len((await stalled.read()).data) == MEBI
            await asyncio.sleep(0.3)
            assert sent[0] < 16 * MEBI and s.offers.budget.held == 40 * MEBI
            pass_time(SECONDS)
            await s.wait_until_idle()
            assert s.offers.counts == Counts(offered=1, broken=1)
            with pytest.raises(aio.AioRpcError) as caught:
                await offers.read()
            assert caught.value.code().name == "DEADLINE_EXCEEDED"
            stalled.cancel()
            (found,) = await s.fetch_all()
            assert found.nbytes == 40 * MEBI, "the budget is whole again"

    asyncio.run(main())


def test_a_piece_that_was_dropped_is_in_memory_no_more() -> None:
    """The failed call does not keep the segment in a reference cycle."""

    async def main() -> None:
        async with servers() as s:
            s.source.given = [large_segment(40 * MEBI)]
            piece = weakref.ref(s.source.given[0].k)
            offers = prefill(s)
            stalled = fetch(s, (await offers.read()).ticket)
            s.source.given = ()
            await stalled.read()
            pass_time(SECONDS)
            await s.wait_until_idle()
            assert s.offers.counts == Counts(offered=1, broken=1) and piece() is None
            stalled.cancel()
            offers.cancel()

    asyncio.run(main())


def test_a_receiver_that_fetches_nothing() -> None:
    """Later pieces wait for room, the first one's time passes, and the prompt is given up."""

    async def main() -> None:
        async with servers(*[large_segment(600)] * 3, buffer=1000) as s:
            offers = prefill(s)
            first = await offers.read()
            while not s.offers.budget.waiting:
                await asyncio.sleep(0)
            pass_time(SECONDS)
            with pytest.raises(aio.AioRpcError) as caught:
                while await offers.read() is not aio.EOF:
                    pass
            assert caught.value.code().name in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"), (
                "whichever comes first"
            )
            assert "--transfer-" in (caught.value.details() or "")
            await s.wait_until_idle()
            with pytest.raises(aio.AioRpcError) as caught:
                await fetch(s, first.ticket).read()
            assert caught.value.code().name == "NOT_FOUND"
            assert s.offers.counts.fetched == 0 < s.offers.counts.expired

    asyncio.run(main())


def test_a_receiver_that_does_not_read_its_offers() -> None:
    async def main() -> None:
        async with servers(*[large_segment(4)] * 3000) as s:
            offers = prefill(s)
            await offers.read()
            pass_time(SECONDS)
            await s.wait_until_idle()
            assert s.offers.counts.fetched == 0 < s.offers.counts.expired
            offers.cancel()

    asyncio.run(main())


# ---- somebody goes away


def test_a_network_that_breaks() -> None:
    async def main() -> None:
        async with (
            servers(random_segment(), large_segment(40 * MEBI)) as s,
            behind_a_proxy(s) as (proxy, client),
        ):
            async with aclosing(client.segments(prompt_of((1,)), now() + SECONDS)) as pieces:
                await anext(pieces)
                second = asyncio.create_task(anext(pieces))
                while proxy.received_bytes < 10 * MEBI:
                    await asyncio.sleep(0)
                proxy.cut()
                assert (await refusal(second)).code == "UNAVAILABLE"
            await s.wait_until_idle()
            assert s.offers.counts == Counts(
                offered=2, fetched=1, broken=1, bytes=random_segment().nbytes
            )
            found: list[KVSegment] = []
            while not found:  # the channel may notice the cut only when it is used again
                with suppress(TransferError):
                    found = await fetch_all(client)
            assert len(found) == 2, "the next prompt finds its way again"

    asyncio.run(main())


def test_a_server_that_ends() -> None:
    async def main() -> None:
        async with servers(random_segment(), random_segment()) as s:
            async with aclosing(s.client.segments(prompt_of((1,)), now() + SECONDS)) as pieces:
                await anext(pieces)
                await s.server.stop(0)
                assert (await refusal(anext(pieces))).code == "UNAVAILABLE"
            assert (await refusal(s.fetch_all())).code == "UNAVAILABLE"
            await s.wait_until_idle()

    asyncio.run(main())


def test_a_channel_that_is_closed() -> None:
    """Tasks that wait get an error and are not cancelled.

    The owner closes a channel when its server is removed.
    """

    async def main() -> None:
        async with servers(random_segment()) as s:
            s.source.before = wait_forever
            channel = aio.insecure_channel(f"127.0.0.1:{s.port}", OPTIONS)
            waiting = asyncio.create_task(fetch_all(s.client_over(channel)))
            while not s.source.open:
                await asyncio.sleep(0.001)
            await channel.close()
            assert (await refusal(waiting)).code == "CANCELLED"
            await s.wait_until_idle()

    asyncio.run(main())


Stage = Callable[[Servers, "asyncio.Task[None]"], Awaitable[None]]


async def before_the_first(s: Servers, work: "asyncio.Task[None]") -> None:
    s.source.before = wait_forever
    while not s.source.open:
        await asyncio.sleep(0)


async def waiting_for_room_there(s: Servers, work: "asyncio.Task[None]") -> None:
    await s.offers.budget.take(s.offers.budget.nbytes, now())
    while not s.offers.budget.waiting:
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.1, s.offers.budget.give, s.offers.budget.nbytes)


async def waiting_for_room_here(s: Servers, work: "asyncio.Task[None]") -> None:
    await s.budget.take(s.budget.nbytes, now())
    while not s.budget.waiting:
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.1, s.budget.give, s.budget.nbytes)


async def while_fetching(s: Servers, work: "asyncio.Task[None]") -> None:
    while not s.offers._taken:
        await asyncio.sleep(0)


async def with_a_piece_in_hand(s: Servers, work: "asyncio.Task[None]") -> None:
    while not s.offers.counts.fetched:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0.001)


STAGES = (
    before_the_first,
    waiting_for_room_there,
    waiting_for_room_here,
    while_fetching,
    with_a_piece_in_hand,
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_cancelled_request_gives_everything_up_at_once(stage: Stage) -> None:
    async def main() -> None:
        async with servers(large_segment(40 * MEBI), large_segment(40 * MEBI)) as s:

            async def receive() -> None:
                async with aclosing(s.client.segments(prompt_of((1,)), now() + SECONDS)) as pieces:
                    async for _ in pieces:
                        await asyncio.Event().wait()

            work = asyncio.create_task(receive())
            await stage(s, work)
            assert not work.done()
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            await s.wait_until_idle()

    asyncio.run(main())


# ---- somebody asks for what is not theirs


def test_wrong_tickets() -> None:
    async def main() -> None:
        async with servers(random_segment()) as s:
            offers = prefill(s)
            ticket = (await offers.read()).ticket
            for wrong in (b"", ticket[:-1], bytes(16), ticket + b"x"):
                with pytest.raises(aio.AioRpcError) as caught:
                    await fetch(s, wrong).read()
                assert caught.value.code().name == "NOT_FOUND"
            assert s.offers.budget.held, "they disturb nobody"
            assert (await fetch(s, ticket).read()).data
            with pytest.raises(aio.AioRpcError) as caught:
                await fetch(s, ticket).read()
            assert caught.value.code().name == "NOT_FOUND"
            assert await offers.read() is aio.EOF

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent", [random_segment(3), random_segment(5), large_segment(4)], ids=["less", "more", "other"]
)
def test_a_sender_that_sends_something_else_than_it_offered(
    sent: KVSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "chunks", lambda piece: chunks(sent))

    async def main() -> None:
        async with servers(random_segment(4)) as s:
            assert (await refusal(s.fetch_all())).code == "DATA_LOSS"
            await s.wait_until_idle()

    asyncio.run(main())


# ---- all of it together

KINDS = {"INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ZeroDivisionError", "CancelledError"}
PIECES = [random_segment(20, 20 * i, seed=i) for i in range(4)] + [large_segment(3 * MEBI // 2)]


@pytest.mark.system
@pytest.mark.parametrize("batches", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_hundreds_of_transfers_with_faults_leave_nothing_behind(batches: int) -> None:
    """The network cuts and stalls, and so do engines and receivers."""

    async def main() -> None:
        rng = random.Random(7)
        limits = {"buffer": 20 * MEBI, "room": 20 * MEBI}
        async with servers(*PIECES, **limits) as s, Proxy.before(s.port) as proxy:
            proxy.limits = lambda: rng.choice((1e9, 1e9, 1e9, rng.uniform(0, 3 * MEBI)))
            began = time.monotonic()
            await s.fetch_all()
            receivers = Receivers(s, proxy, rng, patience=1.5 + 20 * (time.monotonic() - began))
            before = len(asyncio.all_tasks() - proxy._tasks)
            outcomes = Counter[str]()
            s.source.before = partial(failing_engine, rng)
            s.servicer._seconds = 0.7
            done = 0
            # On a slow machine most transfers meet their deadline before another fault.
            while done < batches or (not outcomes.keys() >= KINDS and done < 10 * batches):
                outcomes.update(await asyncio.gather(*(receivers.transfer() for _ in range(100))))
                s.offers.check_invariants()
                done += 1
            s.source.before = do_nothing
            s.servicer._seconds = SECONDS
            await s.wait_until_idle()
            assert outcomes.total() == 100 * done and outcomes["OK"] > 10 * done, outcomes
            assert outcomes.keys() >= KINDS, outcomes
            assert len(await s.fetch_all()) == len(PIECES), "it serves on"
            await s.wait_until_idle()
            until = time.monotonic() + 60
            while len(left := asyncio.all_tasks() - proxy._tasks) > before:
                assert time.monotonic() < until, left
                await asyncio.sleep(0.01)

    asyncio.run(main())


async def failing_engine(rng: random.Random, number: int) -> None:
    """Take a moment for a piece; now and then take very long, or break."""
    dice = rng.random()
    if dice < 0.03:
        raise RuntimeError("a failpoint")
    await asyncio.sleep(5.0 if dice < 0.035 else dice / 1000)


class Receivers:
    """Receivers of all pieces, each over its own connection: some pause, break or go away.

    patience: seconds in which a transfer without a fault ends.
    """

    def __init__(self, s: Servers, proxy: Proxy, rng: random.Random, patience: float):
        self._servers = s
        self._address = f"127.0.0.1:{proxy.port}"
        self._rng = rng
        self._patience = patience
        self._turns = asyncio.Semaphore(10)  # more at a time would measure the machine

    async def transfer(self) -> str:
        """Return how a transfer ended: "OK", a code, or the name of an exception."""
        async with self._turns, aio.insecure_channel(self._address, OPTIONS) as channel:
            work = asyncio.create_task(self._receive(channel))
            if self._rng.random() < 0.1:
                asyncio.get_running_loop().call_later(self._rng.random() / 20, work.cancel)
            try:
                assert await work == len(PIECES)
                return "OK"
            except TransferError as error:
                return error.code
            except (ZeroDivisionError, asyncio.CancelledError) as error:
                return type(error).__name__

    async def _receive(self, channel: aio.Channel) -> int:
        """Return how many pieces came."""
        client = self._servers.client_over(channel)
        deadline = now() + self._rng.choice((0.05, *[self._patience] * 3))
        async with aclosing(client.segments(prompt_of((1, 2)), deadline)) as found:
            came = 0
            async for piece in found:
                assert equal_segments(piece, PIECES[came])
                came += 1
                dice = self._rng.random()
                if dice < 0.02:
                    raise ZeroDivisionError
                await asyncio.sleep(1.0 if dice < 0.025 else dice / 1000)
            return came
