"""One server asks another for a prompt: segments that come, memory held, and refusals."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from grpc import aio

from jaxserve.cluster.compatibility import digest
from jaxserve.cluster.transfer.byte_budget import ByteBudget
from jaxserve.cluster.transfer.fetch import SegmentReceiver, TransferServicer
from jaxserve.cluster.transfer.offers import Counts, OfferStore
from jaxserve.cluster.transfer.prefill import PrefillClient, PrefillPrompt, PrefillServicer
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.errors import QueueFullError
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.server import GrpcEndpoint, Health, bind, new_server
from jaxserve.server.security.auth import BearerTokens
from tests.jaxserve.cluster.transfer.harness import (
    HANDSHAKE,
    MEBI,
    MODEL,
    PIECES,
    SECONDS,
    FakeSource,
    equal_segments,
    fetch_all,
    large_segment,
    now,
    prompt_of,
    random_segment,
    refusal,
    servers,
    weights,
)


def test_pieces_come_bit_for_bit_and_in_order() -> None:
    async def main() -> None:
        async with servers(*PIECES) as s:
            prompt = PrefillPrompt(
                token_ids=tuple(range(5000)), salt="salt", start=32, page_size=16, priority=-3
            )
            found = await s.fetch_all(prompt=prompt)
            assert len(found) == len(PIECES) and all(map(equal_segments, found, PIECES))
            assert s.source.prompts == [prompt]
            await s.wait_until_idle()
            total = sum(piece.nbytes for piece in PIECES)
            assert s.offers.counts == Counts(offered=len(PIECES), fetched=len(PIECES), bytes=total)

    asyncio.run(main())


def test_a_piece_of_many_messages() -> None:
    async def main() -> None:
        piece = random_segment(700, dtype="bfloat16", layers=5, heads=4, width=301)
        assert piece.nbytes > 16 * MEBI
        async with servers(piece) as s:
            (found,) = await s.fetch_all()
            assert equal_segments(found, piece)

    asyncio.run(main())


def test_a_prompt_that_gives_nothing() -> None:
    async def main() -> None:
        async with servers() as s:
            assert await s.fetch_all() == []
            await s.wait_until_idle()

    asyncio.run(main())


def test_pieces_come_while_later_ones_are_computed() -> None:
    async def main() -> None:
        async with servers(*PIECES[:3]) as s:
            came = asyncio.Semaphore(0)

            async def after_the_one_before(number: int) -> None:
                if number:
                    await came.acquire()

            s.source.before = after_the_one_before
            async with aclosing(s.client.segments(prompt_of((1,)), now() + SECONDS)) as pieces:
                async for _ in pieces:
                    came.release()
            await s.wait_until_idle()

    asyncio.run(main())


def test_neither_side_holds_more_than_its_budget() -> None:
    """Four prompts run at a time, with room for one segment and a half."""

    async def main() -> None:
        sizes = [300_000 + 4_000 * i for i in range(12)]
        async with servers(*map(large_segment, sizes), buffer=500_000, room=500_000) as s:
            most = [0, 0]
            done = asyncio.Event()

            async def watch() -> None:
                while not done.is_set():
                    s.offers.check_invariants()
                    most[:] = max(most[0], s.offers.budget.held), max(most[1], s.budget.held)
                    await asyncio.sleep(0)

            watching = asyncio.create_task(watch())
            found = await asyncio.gather(*(s.fetch_all() for _ in range(4)))
            done.set()
            await watching
            assert [[piece.nbytes for piece in pieces] for pieces in found] == [sizes] * 4
            assert min(most) >= 300_000 and max(most) <= 500_000
            await s.wait_until_idle()

    asyncio.run(main())


def test_a_piece_takes_up_room_until_the_next_one_is_asked_for() -> None:
    async def main() -> None:
        async with servers(large_segment(1000), large_segment(2000)) as s:
            async with aclosing(s.client.segments(prompt_of((1,)), now() + SECONDS)) as pieces:
                held = [s.budget.held async for _ in pieces]
            assert held == [1000, 2000] and s.budget.held == 0

    asyncio.run(main())


@pytest.mark.parametrize("buffer, room", [(999, 64 * MEBI), (64 * MEBI, 999)])
def test_a_piece_that_is_larger_than_a_budget_is_refused_by_name(buffer: int, room: int) -> None:
    async def main() -> None:
        async with servers(large_segment(1000), buffer=buffer, room=room) as s:
            error = await refusal(s.fetch_all())
            whose = "prefill" if buffer < room else "decode"
            assert (error.code, str(error)) == (
                "RESOURCE_EXHAUSTED",
                f"a piece of 1000 bytes needs a larger --transfer-buffer of the {whose} server "
                f"(now 999 bytes)",
            )
            assert error.remote == (whose == "prefill")
            await s.wait_until_idle()

    asyncio.run(main())


@pytest.mark.parametrize(
    "theirs, problem",
    [
        ({"the device": "xyz"}, "the device: xyz there, def here"),
        ({"the form": "int8"}, "the form: int8 there, none here"),
        ({"the protocol": "2"}, "the protocol: 2 there, 3 here"),
    ],
)
def test_servers_that_differ_part_with_both_values(theirs: dict[str, str], problem: str) -> None:
    """The number of another release's protocol is a fact like the others."""

    async def main() -> None:
        async with servers(*PIECES, handshake=replace(HANDSHAKE, model=MODEL | theirs)) as s:
            error = await refusal(s.fetch_all())
            assert (error.code, str(error)) == (
                "FAILED_PRECONDITION",
                f"the two servers differ in {problem}",
            )
            assert not s.source.prompts and s.offers.counts == Counts()

    asyncio.run(main())


def test_a_caller_that_states_nothing_is_refused() -> None:
    async def main() -> None:
        async with servers(*PIECES) as s:
            call = rpc.PrefillServiceStub(s.channel).Prefill(
                pb.PrefillRequest(token_ids=[1]), timeout=60
            )
            with pytest.raises(aio.AioRpcError) as caught:
                await call.read()
            assert (
                caught.value.details()
                == "the two servers differ in the protocol: 3 there, none here"
            )

    asyncio.run(main())


def test_a_server_with_other_weights_is_refused_by_the_tensor() -> None:
    """A watch names the tensor; a prompt, which states less, the digests of all."""
    other = replace(HANDSHAKE, weights=weights(second=7))
    with pytest.raises(TransferError) as caught:
        HANDSHAKE.check(pb.WatchRequest(**other.watch_fields()))
    assert caught.value.code == "FAILED_PRECONDITION"
    assert str(caught.value) == "the two servers differ in the weight second"
    with pytest.raises(TransferError) as caught:
        HANDSHAKE.check(pb.PrefillRequest(**other.fields()))
    assert str(caught.value).startswith("the two servers differ in the weights: ")
    HANDSHAKE.check(pb.WatchRequest(**HANDSHAKE.watch_fields()))


def test_facts_without_a_value_are_refused() -> None:
    request = pb.WatchRequest(**HANDSHAKE.fields())
    del request.facts.values[-1]
    with pytest.raises(TransferError, match=r"facts have \d names and \d values") as caught:
        HANDSHAKE.check(request)
    assert caught.value.code == "INVALID_ARGUMENT"


def test_pages_that_cannot_be_made_of_theirs() -> None:
    async def main() -> None:
        async with servers(random_segment(), handshake=replace(HANDSHAKE, page_dtype="int8")) as s:
            for accepted, listed in (
                (("float32", "bfloat16"), "float32 or bfloat16"),
                ((), "nothing"),
                (("bfloat16", "int8"), ""),
            ):
                own = replace(HANDSHAKE, accepted_dtypes=accepted)
                s.client = PrefillClient(s.channel, SegmentReceiver(s.channel, s.budget), own)
                if listed:
                    error = await refusal(s.fetch_all())
                    assert error.code == "FAILED_PRECONDITION"
                    assert str(error) == (
                        f"pages there hold int8, and pages here can be made from {listed} "
                        f"(choose the same --kv on both servers)"
                    )
                else:
                    assert len(await s.fetch_all()) == 1

    asyncio.run(main())


def test_what_the_engine_refuses_is_said_and_a_bug_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with servers(*PIECES) as s:
            for error, code, text in (
                (
                    QueueFullError("1024 requests wait", 1.0),
                    "RESOURCE_EXHAUSTED",
                    "1024 requests wait",
                ),
                (RuntimeError("/etc/keys"), "INTERNAL", "RuntimeError (see this server's log)"),
            ):

                async def refuse(number: int, error: Exception = error) -> None:
                    if number == 2:
                        raise error

                s.source.before = refuse
                found = await refusal(s.fetch_all())
                assert (found.code, str(found)) == (code, text)
                await s.wait_until_idle()
            assert "/etc/keys" in caplog.text and "1024" not in caplog.text

    asyncio.run(main())


def test_it_stands_behind_the_servers_tokens() -> None:
    """The service is an additional one of the server's gRPC, where every call needs a token."""

    async def main() -> None:
        offers = OfferStore(MEBI)
        source = FakeSource([random_segment()])

        def add(server: aio.Server) -> None:
            rpc.add_PrefillServiceServicer_to_server(
                PrefillServicer(source, offers, SECONDS), server
            )
            TransferServicer(offers).add_to(server)

        face = GrpcEndpoint("jaxserve.cluster.v1.PrefillService", add)
        server = new_server(
            Limits(), BearerTokens(("secret",)), Health(False, False, face), None, None, face
        )
        port = bind(server, "127.0.0.1", 0, None, "--port")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with_token = (("authorization", "Bearer secret"),)
            for metadata, receiving in (
                ((), ()),
                (with_token, ()),
                ((), with_token),
                (with_token, with_token),
            ):
                receiver = SegmentReceiver(channel, ByteBudget(MEBI), receiving)
                client = PrefillClient(channel, receiver, HANDSHAKE, metadata)
                if metadata and receiving:
                    assert len(await fetch_all(client)) == 1
                else:
                    assert (await refusal(fetch_all(client))).code == "UNAUTHENTICATED"
        await server.stop(0)
        assert offers.budget.held == 0

    asyncio.run(main())


def test_the_handshake_states_what_it_checks() -> None:
    request = pb.PrefillRequest(**HANDSHAKE.fields())
    HANDSHAKE.check(request)
    assert dict(zip(request.facts.names, request.facts.values, strict=True)) == {
        "the protocol": "3"
    } | MODEL | {"the weights": digest(weights().text())}
    assert request.dtypes == ["float32"]
