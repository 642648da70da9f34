"""What is peculiar to jax.experimental.transfer, where nothing ends by itself. See test_faults.py for what is not."""

import asyncio
import os
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest
from grpc import aio

from jaxserve.cluster.transfer import jax_transfer, jax_transport
from jaxserve.cluster.transfer.byte_budget import Budget
from jaxserve.cluster.transfer.jax_transfer import JaxTransfer
from jaxserve.cluster.transfer.jax_transport import STUCK, JaxServicer
from jaxserve.cluster.transfer.offers import Counts, Shelf
from jaxserve.cluster.transfer.transport import Ticket, TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.cluster.v1 import prefill_pb2_grpc as rpc
from jaxserve.engine.device.compile_counter import CompileCounter
from jaxserve.engine.kv_segment import Piece
from jaxserve.errors import ConfigError
from tests.jaxserve.cluster.transfer.harness import (
    HANDSHAKE,
    MEBI,
    PIECES,
    GrpcWay,
    JaxWay,
    Servers,
    Way,
    client_of,
    fetch_all,
    large,
    now,
    piece_of,
    refusal,
    same,
    servers,
)
from tests.jaxserve.cluster.transfer.test_killed_peers import line, peer


async def ask(s: Servers, ticket: bytes) -> aio.StreamStreamCall:
    call = rpc.TransferServiceStub(s.channel).Pull(timeout=10)
    await call.write(pb.PullRequest(ticket=ticket))
    return call


def offers(s: Servers) -> aio.UnaryStreamCall:
    """A call whose caller does by hand what `PrefillClient` does."""
    request = pb.PrefillRequest(token_ids=[1], page_size=4, **replace(HANDSHAKE, transport="jax").fields())
    return rpc.PrefillServiceStub(s.channel).Prefill(request, timeout=10)


@asynccontextmanager
async def lent(s: Servers) -> AsyncIterator[tuple[aio.StreamStreamCall, pb.PullResponse]]:
    """A piece that is offered to jax."""
    prompt = offers(s)
    call = await ask(s, (await prompt.read()).ticket)
    yield call, await call.read()
    prompt.cancel()


async def code_of(call: aio.StreamStreamCall) -> str:
    """What it fails with."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code().name


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = now() + seconds
    while not condition():
        assert now() < deadline
        await asyncio.sleep(0.001)


def aligned(nbytes: int) -> np.ndarray:
    """Begins where jax takes an array as it is, instead of copying it: its end is the end of the offer."""
    data = np.zeros(nbytes + 64, np.uint8)
    begin = -data.ctypes.data % 64
    return data[begin : begin + nbytes].view(np.float32)


def test_every_dtype_comes_from_another_process() -> None:
    async def main(port: str) -> None:
        way = JaxWay()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            found = await fetch_all(client_of(way, channel, Budget(64 * MEBI)))
            assert len(found) == len(PIECES) and all(map(same, found, PIECES))

    with peer("jax", "dtypes") as sender:
        asyncio.run(main(line(sender).strip()))


@pytest.mark.parametrize("there, here", [("jax", "grpc"), ("grpc", "jax")])
def test_servers_that_send_otherwise_part_with_both_ways(there: str, here: str) -> None:
    ways: dict[str, type[Way]] = {"jax": JaxWay, "grpc": GrpcWay}

    async def main() -> None:
        async with servers(*PIECES, way=ways[there]()) as s:
            error = await refusal(fetch_all(client_of(ways[here](), s.channel, s.budget)))
            assert error.code == "FAILED_PRECONDITION"
            assert str(error) == f"--transport: pieces travel by {there} there, and by {here} here"
            assert not s.source.prompts and s.shelf.counts == Counts()

    asyncio.run(main())


def test_nothing_is_compiled() -> None:
    async def main() -> None:
        counter = CompileCounter()
        async with servers(*PIECES, way=JaxWay()) as s:
            await s.fetch_all()
            async with lent(s) as (call, _):
                call.cancel()
            await s.at_rest()
        counter.close()
        assert counter.count == 0

    asyncio.run(main())


# ---- offers that break off


@pytest.mark.parametrize("pulled", ["nothing", "one of two arrays", "everything"])
@pytest.mark.parametrize("end", ["cancelled", "expired", "left"])
def test_an_offer_that_breaks_off_is_drained(pulled: str, end: str) -> None:
    """Whatever of it the other side has pulled: jax lets go of the arrays, and the budget is whole."""
    freed = []

    async def main() -> None:
        way = JaxWay()
        async with servers(way=way, seconds=0.5 if end == "expired" else 10.0) as s:
            k, v = (aligned(4 * MEBI).reshape(1, 2**20, 1, 1) for _ in range(2))
            freed.extend(weakref.ref(array.base) for array in (k, v))
            s.source.given = [Piece(0, 0, k, v)]
            arrays = Ticket.of(b"", s.source.given[0]).arrays
            del k, v
            async with lent(s) as (call, response):
                s.source.given = []
                if pulled != "nothing":
                    connection = way.here.connect(response.address)
                    some = arrays if pulled == "everything" else arrays[:1]
                    assert len(await way.here.pull(connection, response.uuids[: len(some)], some)) == len(some)
                assert s.shelf.budget.held == 8 * MEBI and s.shelf._taken
                if end == "cancelled":
                    call.cancel()
                elif end == "left":
                    await call.done_writing()
                else:
                    assert await code_of(call) == "DEADLINE_EXCEEDED"
                await until(lambda: not s.shelf._taken)
                assert s.shelf.counts == Counts(offered=1, broken=1)
            await s.at_rest()
            assert way.servicer and (way.servicer.drained, way.servicer.draining.stuck) == (1, 0)

            def all_freed() -> bool:
                jax.device_put(np.zeros(1))  # jax forgets in its next call
                return not any(reference() is not None for reference in freed)

            await until(all_freed)

    asyncio.run(main())


def test_who_comes_too_late_fails_and_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a minute: then nothing is left of the offer."""

    async def main() -> None:
        way = JaxWay()
        async with servers(piece_of(), way=way) as s:
            for last in (False, True):
                async with lent(s) as (call, response):
                    call.cancel()
                await s.at_rest()
                late = way.here.pull(
                    way.here.connect(response.address), response.uuids, Ticket.of(b"", piece_of()).arrays
                )
                if last:
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(late, 0.5)
                else:
                    with pytest.raises(TransferError) as caught:
                        await asyncio.wait_for(late, 5)
                    assert caught.value.code == "UNAVAILABLE"
                monkeypatch.setattr(jax_transfer, "LATE", 0.0)
            assert not way.there._over

    asyncio.run(main())


def test_stuck_pulls_keep_their_room_and_are_bounded() -> None:
    """Until what they ask for is there after all."""

    async def main() -> None:
        way = JaxWay()

        class Liar(JaxServicer):
            async def Pull(self, requests: AsyncIterator[pb.PullRequest], context: aio.ServicerContext) -> None:
                asked.append(len(asked))
                await context.write(pb.PullResponse(address=way.there.address, uuids=both(asked[-1])))
                await context.read()
                await context.read()

        def both(number: int) -> tuple[int, int]:
            return number, number + 100

        asked: list[int] = []
        server = aio.server()
        rpc.add_TransferServiceServicer_to_server(Liar(Shelf(MEBI), way.there), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with servers() as s, aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            receiver, piece = way.receiver(channel, s.budget), piece_of()
            ticket = Ticket.of(b"", piece)

            async def fetch(seconds: float) -> Piece:
                async with receiver.fetch(ticket, now() + seconds) as found:
                    return found

            errors = await asyncio.gather(*(refusal(fetch(0.2)) for _ in range(STUCK)))
            assert {error.code for error in errors} == {"DEADLINE_EXCEEDED"}
            await until(lambda: receiver.left.stuck == STUCK)
            assert s.budget.held == STUCK * piece.nbytes
            error = await refusal(fetch(5.0))
            assert error.code == "UNAVAILABLE" and len(asked) == STUCK
            assert str(error).startswith("8 pulls from that server neither come nor fail")
            arrays = await way.there.put(list(piece.arrays.values()))
            for uuid in range(STUCK + 1):
                for number, array in zip(both(uuid), arrays, strict=True):
                    way.there._server.await_pull(number, [array])
            await until(lambda: receiver.left.stuck == 0)
            assert s.budget.held == 0 == len(receiver.left)
            assert same(await fetch(5.0), piece)
        await server.stop(0)

    asyncio.run(main())


def test_wrong_tickets() -> None:
    async def main() -> None:
        async with servers(piece_of(), way=JaxWay()) as s:
            prompt = offers(s)
            ticket = (await prompt.read()).ticket
            for wrong in (b"", ticket[:-1], bytes(16), ticket + b"x"):
                assert await code_of(await ask(s, wrong)) == "NOT_FOUND"
            assert s.shelf.budget.held, "they disturb nobody"
            call = await ask(s, ticket)
            assert (await call.read()).uuids
            assert await code_of(await ask(s, ticket)) == "NOT_FOUND"
            call.cancel()
            prompt.cancel()
            await s.at_rest()

    asyncio.run(main())


# ---- senders that are none


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", "localhost:80", "0.0.0.0:80", "127.0.0.1:x", "127.0.0.1:0", "x" * 99]
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(TransferError, match=r"is no address of jax\.experimental\.transfer"):
        JaxTransfer("127.0.0.1").connect(address)


@pytest.mark.parametrize("sent", [piece_of(3), piece_of(5), large(4)], ids=["less", "more", "other"])
def test_a_sender_that_has_something_else_than_it_offered(sent: Piece, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        way = JaxWay()
        async with servers(piece_of(4), way=way) as s:
            put = way.there.put
            monkeypatch.setattr(way.there, "put", lambda _: put(list(sent.arrays.values())))
            assert (await refusal(s.fetch_all())).code in ("UNAVAILABLE", "DATA_LOSS")
            await s.at_rest()
            monkeypatch.undo()
            assert len(await s.fetch_all()) == 1, "by another connection, if need be"

    asyncio.run(main())


def test_a_piece_with_an_empty_array_is_not_waited_for() -> None:
    async def main() -> None:
        async with servers(piece_of(0), way=JaxWay()) as s:
            assert (await refusal(s.fetch_all())).code == "DATA_LOSS"
            await until(lambda: not (s.shelf._lots or s.shelf._taken))
            await s.at_rest()

    asyncio.run(main())


# ---- where it is not to be had


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "localhost", "192.0.2.1"])
def test_a_host_that_is_not_this_ones_number(host: str) -> None:
    with pytest.raises(ConfigError, match="--transport jax: "):
        JaxTransfer(host)


def test_a_jax_without_the_cpu() -> None:
    code = "from jaxserve.cluster.transfer.jax_transfer import JaxTransfer; JaxTransfer('127.0.0.1')"
    elsewhere = os.environ | {"JAX_PLATFORMS": "tpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=elsewhere)
    assert "ConfigError: --transport jax: jax has no CPU backend (JAX_PLATFORMS): " in done.stderr


def test_a_jax_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.experimental.transfer", None)
    with pytest.raises(ConfigError, match=r"--transport jax: jax .* has no jax\.experimental\.transfer"):
        JaxTransfer("127.0.0.1")


# ---- processes


def test_a_receiver_that_stops_in_the_midst_holds_back_the_others_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said by name meanwhile, and nobody waits."""
    monkeypatch.setattr(jax_transport, "DRAINING", 0.3)

    async def main() -> None:
        way = JaxWay()
        limits = {"buffer": 150 * MEBI, "room": 150 * MEBI, "seconds": 1.0}
        async with servers(large(100 * MEBI), **limits, way=way) as s:
            with peer("jax", "stopping", str(s.port)) as receiver:
                await until(lambda: way.servicer and way.servicer.draining.stuck, 20)
                assert s.shelf.budget.held == 100 * MEBI and s.shelf.counts == Counts(offered=1, broken=1)
                s.source.given = [large(MEBI)]
                error = await refusal(s.fetch_all())
                assert (error.code, "a receiver stalls" in str(error)) == ("UNAVAILABLE", True)
                receiver.kill()
                await s.at_rest()
                assert way.servicer and way.servicer.drained == 1
                assert len(await s.fetch_all()) == 1

    asyncio.run(main())


def test_a_process_ends_well_with_a_pull_that_never_comes() -> None:
    code = """if True:
        import asyncio, jax, numpy as np
        jax.config.update("jax_platforms", "cpu")
        from jaxserve.cluster.transfer.jax_transfer import JaxTransfer
        from jaxserve.cluster.transfer.transport import Array

        async def main():
            end = JaxTransfer("127.0.0.1")
            work = end.pull(end.connect(end.address), [1], [Array("k", np.dtype("int8"), (5,))])
            await asyncio.wait_for(work, 0.1)

        try:
            asyncio.run(main())
        except TimeoutError:
            print("left")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
