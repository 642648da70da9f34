"""Faults during a remote prefill: the client gets its tokens or one status, and nothing is left."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc import aio

from jaxserve.cluster.transfer import prefill as prefilling
from jaxserve.errors import DeadlineError, DrainingError
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.prompt_encoder import SHORT_PROMPT
from jaxserve.server.disaggregation.prefill_pool import State
from jaxserve.server.lifecycle import Lifecycle
from jaxserve.v1 import admin_pb2
from tests.jaxserve.cluster.transfer.harness import now, pass_time
from tests.jaxserve.server.disaggregation.harness import (
    LONG,
    PLAN,
    Apart,
    apart,
    asking,
    plain,
    tokens_of,
)
from tests.jaxserve.server.harness import until

Fault = Callable[[Apart], Awaitable[None]]


async def kill(servers: Apart) -> None:
    """Make a server look as if its process were gone."""
    servers.proxies[0].cut()
    await servers.prefills[0].stop(0)


async def cut(servers: Apart) -> None:
    servers.proxies[0].cut()


async def freeze(servers: Apart) -> None:
    servers.proxies[0].frozen.set()


async def break_engine(servers: Apart) -> None:
    def explode(number: int) -> None:
        raise RuntimeError("a failpoint")

    servers.prefills[0].runner.hook = explode


FAULTS: dict[str, Fault] = {"killed": kill, "cut": cut, "frozen": freeze, "broken": break_engine}
WHY = {  # a connection that was cut may be there again before the next piece is asked for
    "killed": {"unavailable"},
    "cut": {"unavailable", "not_found"},
    "frozen": {"deadline_exceeded"},
    "broken": {"unavailable"},
}


@asynccontextmanager
async def before_step(servers: Apart, number: int) -> AsyncIterator[asyncio.Event]:
    """Stop the prefill server before a step of its device; yield an event that is set then."""
    runner = servers.prefills[0].runner
    loop = asyncio.get_running_loop()
    there = asyncio.Event()
    go_on = threading.Event()
    stop_at = runner.steps + number

    def hook(steps: int) -> None:
        if steps == stop_at:
            loop.call_soon_threadsafe(there.set)
            go_on.wait()

    runner.hook = hook
    try:
        yield there
    finally:
        go_on.set()


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_while_the_prompt_is_computed(
    tmp_path: Path, fault: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault comes before the first page or after some: the rest is computed here."""

    async def main() -> None:
        [expected] = await plain(tmp_path, asking())
        async with apart(tmp_path) as servers:
            async with before_step(servers, step) as there:
                answering = asyncio.ensure_future(servers.decode.inference.Generate(asking()))
                await there.wait()
                if step > 1:
                    await until(lambda: len(servers.decode.engine.scheduler.lanes[0].caches[0]))
                await FAULTS[fault](servers)
                if fault == "frozen":
                    pass_time(PLAN.seconds)
            response = await answering
            assert tokens_of(response) == expected
            assert (response.usage.cached_prompt_tokens > 0) == (step > 1)
            assert sum(servers.failures.values()) == 1 and servers.failures.keys() <= WHY[fault]
            assert not servers.count("seconds_count")
            servers.proxies[0].cut()  # what was computed meanwhile is on offer for long
            await servers.at_rest()
            assert tokens_of(await servers.decode.inference.Generate(asking())) == expected
            await servers.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("fault", FAULTS)
def test_before_and_after(tmp_path: Path, fault: str) -> None:
    """A lost server is not asked again; pages that came from it stay."""

    async def main() -> None:
        requests = [asking(), asking("b" + LONG)]
        expected = await plain(tmp_path, *requests)
        async with apart(tmp_path) as servers:
            first = await servers.decode.inference.Generate(requests[0])
            await FAULTS[fault](servers)
            again = await servers.decode.inference.Generate(requests[0])
            assert again.usage.cached_prompt_tokens >= first.usage.cached_prompt_tokens > 0
            asked = asyncio.ensure_future(servers.decode.inference.Generate(requests[1]))
            if fault == "frozen":
                await until(lambda: servers.decisions("remote") == 2)
                pass_time(PLAN.seconds)
            other = await asked
            assert [tokens_of(response) for response in (first, other)] == expected
            assert tokens_of(again) == expected[0]
            assert 1 <= sum(servers.failures.values()) + servers.decisions("local_no_server") <= 2
            await servers.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["cut", "killed", "frozen", "broken"])
def test_a_server_that_is_gone_is_noticed(tmp_path: Path, fault: str) -> None:
    async def main() -> None:
        async with apart(tmp_path) as servers:
            if fault == "broken":
                await break_engine(servers)
                await servers.decode.inference.Generate(asking())  # an engine fails when it runs
            else:
                await FAULTS[fault](servers)
            if fault == "frozen":
                pass_time(prefilling.SILENCE)
            await servers.until(State.UNREACHABLE)
            if fault == "cut":
                await servers.until(State.READY)

    asyncio.run(main())


def test_nobody_waits_for_a_server_that_fell_silent(tmp_path: Path) -> None:
    """A stopped process keeps its connection, and is noticed long before --transfer-timeout."""

    async def main() -> None:
        async with apart(tmp_path, plan=replace(PLAN, seconds=10 * prefilling.SILENCE)) as servers:
            async with before_step(servers, 3) as there:
                answering = asyncio.ensure_future(servers.decode.inference.Generate(asking()))
                await there.wait()
                await freeze(servers)
                pass_time(prefilling.SILENCE)
                assert tokens_of(await answering)
            assert servers.failures == {"deadline_exceeded": 1} and servers.states == {
                "unreachable": 1
            }
            servers.proxies[0].cut()
            await servers.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("way", ["cancel", "abort"])
def test_a_client_that_goes_away(tmp_path: Path, way: str, step: int) -> None:
    """The prefill server gives the prompt up as well."""

    async def main() -> None:
        async with apart(tmp_path) as servers:
            async with before_step(servers, step) as there:
                call = servers.decode.inference.Generate(asking(request_id="one"))
                await until(there.is_set)
                if way == "cancel":
                    call.cancel()
                else:
                    await servers.decode.admin.Abort(admin_pb2.AbortRequest(request_ids=["one"]))
                    assert (await call).choices[0].finish.reason  # it ends as an abort does
                code = await call.code()
                expected = {"cancel": "CANCELLED", "abort": "OK"}
                assert code.name == expected[way]
                await until(lambda: not servers.decode.service.in_flight)
            await servers.at_rest()
            assert servers.failures == {"cancelled": 1}
            assert servers.prefills[0].engine.scheduler.preemptions == 0
            assert tokens_of(await servers.decode.inference.Generate(asking()))
            await servers.at_rest()

    asyncio.run(main())


def test_a_decode_engine_that_fails(tmp_path: Path) -> None:
    """The clients get a status, and the prefill server drops the prompt."""

    async def main() -> None:
        async with apart(tmp_path) as servers:
            async with before_step(servers, 3) as there:
                call = servers.decode.inference.Generate(asking())
                await there.wait()
                servers.decode.runner.hook = lambda number: 1 // 0 and None
                with pytest.raises(aio.AioRpcError) as failed:
                    await servers.decode.inference.Generate(asking("short"))
                assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
                with pytest.raises(aio.AioRpcError) as failed:
                    await call
                assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            await servers.prefills[0].at_rest()
            await until(lambda: not servers.prefill_roles[0].offers.budget.held)

    asyncio.run(main())


def test_what_is_tokenized_when_all_ends_is_not_handed_over(tmp_path: Path) -> None:
    """The end of a drain fails a request that is still being tokenized, at once."""

    async def main() -> None:
        async with apart(tmp_path, max_context=4096, num_pages=2048) as servers:
            service = servers.decode.service
            go_on = threading.Event()
            for _ in range(2):  # its threads
                service._workers._tokenizing.submit(go_on.wait)
            call = servers.decode.inference.Generate(asking(LONG * (1 + SHORT_PROMPT // len(LONG))))
            await until(lambda: service.in_flight)
            service.fail_all(DrainingError("the server ends"))
            go_on.set()
            assert (
                await call.code()
            ).name == "UNAVAILABLE" and await call.details() == "the server ends"
            assert not servers.decisions("remote")

    asyncio.run(main())


@pytest.mark.system
def test_a_deadline_that_passes_before_the_decision(tmp_path: Path) -> None:
    """The number of cached tokens is asked between two steps, and a step may take long."""

    async def main() -> None:
        async with apart(tmp_path) as servers:
            with servers.decode.holding():
                other = asyncio.ensure_future(servers.decode.inference.Generate(asking("short")))
                await until(lambda: servers.decode.runner.steps)
                with pytest.raises(DeadlineError):
                    call = IncomingRequest(prompt=LONG, timeout=0.2)
                    with await servers.decode.service.answer(call) as answer:
                        await answer.whole()
            await other
            await servers.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_buffer_that_is_too_small(tmp_path: Path, side: str) -> None:
    """The buffer cannot hold one segment: the prompt is computed here, and the log says why."""

    async def main() -> None:
        [expected] = await plain(tmp_path, asking())
        small = replace(PLAN, buffer=100)
        async with apart(tmp_path, plan=small if side == "receiver" else PLAN) as servers:
            if side == "sender":
                servers.prefill_roles[0].offers.budget.nbytes = 100
            else:
                servers.prefill_roles[0].offers.budget.nbytes = PLAN.buffer
            assert tokens_of(await servers.decode.inference.Generate(asking())) == expected
            assert servers.failures == {"resource_exhausted": 1}
            await servers.at_rest()

    asyncio.run(main())


def test_the_own_buffer_is_no_fault_of_a_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the side whose flag is too small, and other prompts are still sent."""

    async def main() -> None:
        async with apart(tmp_path) as servers:
            servers.role._budget.nbytes = 100
            for i in range(2):
                await servers.decode.inference.Generate(asking(f"{i}{LONG}"))
            assert servers.failures == {"resource_exhausted": 2}
            assert "--transfer-buffer of the decode server" in caplog.text
            await servers.at_rest()

    asyncio.run(main())


def test_prompts_that_are_away_count_as_waiting(tmp_path: Path) -> None:
    """Otherwise all of them would arrive in the queue at once."""

    async def main() -> None:
        limits = Limits(max_waiting_tokens=2 * len(LONG) + 10)
        async with apart(tmp_path, decode_limits=limits) as servers:
            async with before_step(servers, 1):
                calls = [servers.decode.inference.Generate(asking(f"{i}{LONG}")) for i in range(2)]
                await until(lambda: servers.decisions("remote") == 2)
                with pytest.raises(aio.AioRpcError) as refused:
                    await servers.decode.inference.Generate(asking("one more"))
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "--max-waiting-tokens" in (refused.value.details() or "")
            for call in calls:
                assert tokens_of(await call)
            await servers.decode.inference.Generate(asking("one more"))
            await servers.at_rest()

    asyncio.run(main())


def test_a_server_that_fails_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing server has the shortest queue and would get every prompt."""
    monkeypatch.setattr("jaxserve.server.disaggregation.prefill_pool.REST_SECONDS", 1e6)

    async def main() -> None:
        async with apart(tmp_path) as servers:
            budget = servers.prefill_roles[0].offers.budget
            budget.nbytes = 100
            for i in range(3):
                await servers.decode.inference.Generate(asking(f"{i}{LONG}"))
            assert (
                servers.failures == {"resource_exhausted": 1}
                and servers.decisions("local_no_server") == 2
            )
            budget.nbytes = PLAN.buffer
            for server in servers.role._pool._servers.values():
                server._rests_until -= 1e6
            await servers.decode.inference.Generate(asking())
            assert servers.count("seconds_count") == 1 and servers.decisions("remote") == 2
            await servers.at_rest()

    asyncio.run(main())


def test_a_prompt_that_is_refused_is_no_fault_of_the_server(tmp_path: Path) -> None:
    """The prefill server has a shorter context; other prompts are still sent to it."""

    async def main() -> None:
        async with apart(tmp_path, prefill_options={"max_context": 220}) as servers:
            assert tokens_of(await servers.decode.inference.Generate(asking("a" + 2 * LONG)))
            assert servers.failures == {"invalid_argument": 1}
            await servers.decode.inference.Generate(asking())
            assert servers.count("seconds_count") == 1
            await servers.at_rest()

    asyncio.run(main())


def test_half_of_a_deadline_is_for_this_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with apart(tmp_path) as servers:
            async with before_step(servers, 1) as there:
                call = asyncio.ensure_future(
                    servers.decode.inference.Generate(asking(), timeout=PLAN.seconds)
                )
                await there.wait()
                pass_time(PLAN.seconds / 2)
                assert tokens_of(await call) and servers.failures == {"deadline_exceeded": 1}
            await servers.at_rest()

    asyncio.run(main())


def test_a_prefill_server_that_drains(tmp_path: Path) -> None:
    """A draining server finishes its prompts and gets no more."""

    async def main() -> None:
        async with apart(tmp_path, prefill_seconds=0.02) as servers:
            answering = asyncio.ensure_future(servers.decode.inference.Generate(asking()))
            await until(lambda: servers.prefills[0].runner.steps)
            servers.prefills[0].readiness.set_draining()
            assert tokens_of(await answering)
            assert not servers.failures and servers.count("seconds_count") == 1
            await servers.until(State.UNREACHABLE)
            await servers.decode.inference.Generate(asking("b" + LONG))
            assert servers.decisions("local_no_server") == 1
            await servers.at_rest()

    asyncio.run(main())


@pytest.mark.system
def test_a_prefill_server_that_ends(tmp_path: Path) -> None:
    """The server takes calls until its segments are fetched, though no request runs any more."""

    async def main() -> None:
        async with apart(tmp_path, prefill_options={"opened": False}, ready=False) as servers:
            prefill = servers.prefills[0]
            role = servers.prefill_roles[0]
            buffer = servers.role._budget
            lifecycle = Lifecycle(
                prefill.readiness,
                prefill.process.listeners,
                drain_timeout=600,
                leaving=lambda: role.exports_in_flight,
            )
            life = asyncio.create_task(lifecycle.run(lambda: prefill.served))
            await servers.until(State.READY)
            await buffer.take(buffer.nbytes, now())  # nothing is fetched
            answering = asyncio.ensure_future(servers.decode.inference.Generate(asking()))
            await until(lambda: prefill.runner.steps)
            lifecycle.drain()
            await until(lambda: not prefill.service.in_flight)
            await asyncio.sleep(0.2)
            buffer.give(buffer.nbytes)
            assert tokens_of(await answering)
            assert not servers.failures and servers.count("seconds_count") == 1
            assert await life == 0

    asyncio.run(main())


def test_a_full_cache_takes_what_it_can(tmp_path: Path) -> None:
    """Running requests hold most pages: pages that find no room are computed here in turn."""

    async def main() -> None:
        texts = [f"{i}{LONG}" for i in range(6)]
        requests = [asking(text, sampling={"max_tokens": 40}) for text in texts]
        expected = await plain(tmp_path, *requests)
        async with apart(tmp_path, prefill_options={"num_pages": 512}, num_pages=120) as servers:
            found = await asyncio.gather(*map(servers.decode.inference.Generate, requests))
            assert list(map(tokens_of, found)) == expected
            assert servers.decisions("remote")
            await servers.at_rest()

    asyncio.run(main())
