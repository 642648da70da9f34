"""Ends of requests: one terminal status, all pages back, no task or thread left."""

import asyncio
import gc
import resource
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from jaxserve.errors import DeadlineError, QueueFullError
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.workers import MAX_TOKENIZE_CALLS
from jaxserve.v1 import admin_pb2, common_pb2, inference_pb2
from tests.jaxserve.server.harness import Running, running, until

KINDS = {"unary": 1, "stream": 1, "n=4": 4}  # choices
TOKENS = 24
Ending = Callable[[Running, str], Awaitable[str]]


def sampling(n: int, **given: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(seed=1, max_tokens=TOKENS, n=n, ignore_eos=True, **given)


def start(server: Running, kind: str, **options: Any) -> Any:
    """Start a call."""
    params = sampling(KINDS[kind])
    timeout = options.pop("timeout", None)
    fields: dict[str, Any] = {
        "text": "hello there",
        "sampling": params,
        "request_id": "one",
    } | options
    if kind == "unary":
        return server.inference.Generate(inference_pb2.GenerateRequest(**fields), timeout=timeout)
    return server.inference.GenerateStream(
        inference_pb2.GenerateStreamRequest(**fields), timeout=timeout
    )


async def outcome(call: Any, kind: str) -> str:
    """Read everything and return the status's name; FinishInfo is there exactly when it is OK."""
    finished = 0
    try:
        if kind == "unary":
            await call
            finished = 1
        else:
            while (event := await call.read()) is not aio.EOF:
                assert not finished, "something comes after FinishInfo"
                finished += event.WhichOneof("event") == "finish_info"
    except aio.AioRpcError:
        assert not finished
    except asyncio.CancelledError:
        assert call.cancelled()
    code = await call.code()
    assert (code is grpc.StatusCode.OK) == bool(finished)
    return code.name


async def ok(server: Running, kind: str) -> str:
    return await outcome(start(server, kind), kind)


def cancelled_at(tokens: int) -> Ending:
    """Cancel after some tokens of the first choice, or after some steps of a unary call."""

    async def ending(server: Running, kind: str) -> str:
        call = start(server, kind)
        if kind == "unary":
            while server.runner.steps < tokens:
                await asyncio.sleep(0.001)
        else:
            seen = 0
            while seen < tokens:
                event = await call.read()
                seen += len(event.delta.token_ids) if event.delta.index == 0 else 0
        call.cancel()
        return await outcome(call, kind)

    return ending


async def deadline(server: Running, kind: str) -> str:
    server.runner.seconds = 0.02
    return await outcome(start(server, kind, timeout=0.15), kind)


async def aborted(server: Running, kind: str) -> str:
    server.runner.seconds = 0.01
    call = start(server, kind)
    while server.runner.steps < 5:
        await asyncio.sleep(0.001)
    response = await server.admin.Abort(admin_pb2.AbortRequest(request_ids=["one", "nobody"]))
    assert list(response.aborted_request_ids) == ["one"]
    return await outcome(call, kind)


async def not_finite(server: Running, kind: str) -> str:
    server.runner.spoils = lambda number, lane, row: number == 6
    return await outcome(start(server, kind), kind)


async def engine_fails(server: Running, kind: str) -> str:
    def explode(number: int) -> None:
        if number == 6:
            raise RuntimeError("the device died")

    server.runner.hook = explode
    return await outcome(start(server, kind), kind)


async def client_killed(server: Running, kind: str) -> str:
    """Close the connection without ending the call."""
    server.runner.seconds = 0.005
    async with aio.insecure_channel(
        server.address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        alone = replace(server, channel=channel)
        call = start(alone, kind)
        while server.runner.steps < 5:
            await asyncio.sleep(0.001)
        await channel.close()
    return await outcome(call, kind)


ENDINGS: dict[str, tuple[Ending, str]] = {
    "ok": (ok, "OK"),
    "cancel at the first": (cancelled_at(1), "CANCELLED"),
    "cancel at the fifth": (cancelled_at(5), "CANCELLED"),
    "cancel at the last": (cancelled_at(TOKENS - 1), "CANCELLED or OK"),
    "deadline": (deadline, "DEADLINE_EXCEEDED"),
    "abort": (aborted, "OK"),
    "not finite": (not_finite, "INTERNAL"),
    "engine fails": (engine_fails, "UNAVAILABLE"),
    "client killed": (client_killed, "CANCELLED"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.system if name == "deadline" else ())
        for name in ENDINGS
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_ending(tmp_path: Path, kind: str, name: str) -> None:
    ending, expected = ENDINGS[name]

    async def main() -> None:
        async with running(tmp_path, seconds=0.002, max_batch=8) as server:
            tasks = len(asyncio.all_tasks())
            assert await ending(server, kind) in expected.split(" or ")
            if name == "engine fails":
                assert not server.service.in_flight and len(server.failures) == 1
                return
            server.runner.spoils = lambda number, lane, row: False
            server.runner.seconds = 0
            await server.at_rest()
            assert await ok(server, kind) == "OK"  # everybody else is served as before
            await server.at_rest()
            await until(lambda: len(asyncio.all_tasks()) <= tasks + 1)

    before = set(threading.enumerate())
    asyncio.run(main())
    assert not [t for t in threading.enumerate() if t not in before and t.name == "engine"]


@pytest.mark.slow
def test_ten_thousand_cancels(tmp_path: Path) -> None:
    """Rapid resets leave nothing behind but the few hundred bytes that grpc.aio keeps of each."""

    def memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    async def cancels(server: Running, number: int) -> tuple[int, int]:
        for _ in range(number // 10):
            calls = [start(server, "stream", request_id="") for _ in range(10)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            while (
                len(asyncio.all_tasks()) > 100
            ):  # a cancelled call is over for its client long before grpc is done
                await asyncio.sleep(0.001)
        await server.at_rest()
        assert not server.service._answers and not server.service._requests
        server.runner.launches.clear()
        gc.collect()
        return len(gc.get_objects()), memory()

    async def main() -> None:
        async with running(tmp_path, max_batch=4) as server:
            objects, size = await cancels(server, 3000)
            objects_after, size_after = await cancels(server, 7000)
            assert objects_after - objects < 7000 / 2
            assert size_after - size < 7000 * 2048

    asyncio.run(main())


def test_an_id_in_flight_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, seconds=0.01) as server:
            first = start(server, "stream")
            await first.read()
            assert await outcome(start(server, "unary"), "unary") == "ALREADY_EXISTS"
            assert await outcome(first, "stream") == "OK"
            await server.at_rest()

    asyncio.run(main())


async def refused_of(server: Running, texts: list[str], refused: int) -> list[Any]:
    """Return the refused calls while the device holds its first step; all others end with OK."""
    with server.holding():
        calls = [start(server, "unary", request_id="", text=text) for text in texts]
        outcomes = [asyncio.create_task(outcome(call, "unary")) for call in calls]
        await until(lambda: sum(each.done() for each in outcomes) >= refused)
    names = await asyncio.gather(*outcomes)
    assert names.count("OK") == len(texts) - refused
    await server.at_rest()
    return [call for call, name in zip(calls, names, strict=True) if name == "RESOURCE_EXHAUSTED"]


def test_queue_limits(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, limits=Limits(max_waiting_requests=3), max_batch=1) as server:
            refused = await refused_of(server, ["x"] * 8, 5)
            assert len(refused) == 5
            assert int(dict(await refused[0].trailing_metadata())["grpc-retry-pushback-ms"]) > 0

    asyncio.run(main())


def test_waiting_tokens_are_limited(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, limits=Limits(max_waiting_tokens=250), max_batch=1) as server:
            assert len(await refused_of(server, ["x" * 99] * 4, 2)) == 2
            await server.at_rest()
            alone = start(server, "unary", text="x" * 400)
            assert await outcome(alone, "unary") == "OK", "nobody else waits"

    asyncio.run(main())


@pytest.mark.system
def test_a_deadline_that_cannot_be_met_is_refused_at_once(tmp_path: Path) -> None:
    """A deadline that prompts of 18 steps ahead make impossible is refused.

    A request that goes before these prompts is not. Nor is one with nothing ahead: what the server
    knows may not hold any more.
    """

    async def main() -> None:
        async with running(tmp_path, seconds=0.05, max_batch=1, prefix_cache=False) as server:
            known = [start(server, "unary", request_id="", text="x" * 400) for _ in range(3)]
            assert [await outcome(call, "unary") for call in known] == ["OK"] * 3
            with await server.service.answer(IncomingRequest(prompt="x" * 400, timeout=0.1)):
                pass
            await server.at_rest()
            before = [start(server, "unary", request_id="", text="x" * 400) for _ in range(3)]
            await until(lambda: len(server.service._answers) == 3)
            assert server.service.queue_seconds > 0.5
            # Not over gRPC, which ends a call at its deadline whatever the server says.
            with pytest.raises(DeadlineError, match="at the best pace so far"):
                await server.service.answer(IncomingRequest(prompt="x" * 400, timeout=0.1))
            with pytest.raises(QueueFullError, match="s long, and an answer takes") as refused:
                await server.service.answer(IncomingRequest(prompt="x" * 10, timeout=0.5))
            assert (refused.value.retry_after or 0) > 0
            first = start(server, "unary", text="x" * 10, timeout=60)
            assert await outcome(first, "unary") == "OK"
            assert [await outcome(call, "unary") for call in before] == ["OK"] * 3
            await server.at_rest()
            assert server.service.queue_seconds == 0

    asyncio.run(main())


@pytest.mark.system
def test_aborted_while_it_is_tokenized(tmp_path: Path) -> None:
    """A conversation that is aborted while it is rendered ends with reason abort and never runs.

    Its id may be used again.
    """
    release = threading.Event()

    async def main() -> None:
        async with running(tmp_path) as server:
            tokenizer = server.service.prompts.tokenizer
            encode = tokenizer.encode_special
            tokenizer.encode_special = lambda text: (release.wait(60), encode(text))[1]  # type: ignore[method-assign]
            messages = [inference_pb2.ChatMessage(role="u", content="hi")]
            request = inference_pb2.ChatStreamRequest(
                request_id="one", messages=messages, sampling=sampling(1)
            )
            call = server.inference.ChatStream(request)
            while not server.service.in_flight:
                await asyncio.sleep(0.001)
            response = await server.admin.Abort(admin_pb2.AbortRequest(request_ids=["one"]))
            assert list(response.aborted_request_ids) == ["one"]
            release.set()
            events = [event async for event in call]
            (choice,) = events[-1].finish_info.choices
            assert (
                choice.reason == common_pb2.FINISH_REASON_ABORTED
                and not server.runner.launches["one"]
            )
            await server.at_rest()
            events = [event async for event in server.inference.ChatStream(request)]
            (choice,) = events[-1].finish_info.choices
            assert choice.reason != common_pb2.FINISH_REASON_ABORTED
            await server.at_rest()

    asyncio.run(main())


def test_a_score_that_is_aborted_has_no_total(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, seconds=0.02, step_tokens=16) as server:
            call = server.inference.Score(
                inference_pb2.ScoreRequest(text="x" * 200, request_id="one")
            )
            while server.runner.steps < 3:
                await asyncio.sleep(0.001)
            await server.admin.Abort(admin_pb2.AbortRequest(request_ids=["one"]))
            assert await outcome(call, "unary") == "CANCELLED" and "aborted" in await call.details()
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.system
def test_a_call_that_gives_up_on_the_engine_does_not_end_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            with server.holding():
                call = start(server, "stream")
                await until(lambda: server.runner.steps)
                flush = server.admin.FlushCache(admin_pb2.FlushCacheRequest(), timeout=0.02)
                assert await outcome(flush, "unary") == "DEADLINE_EXCEEDED"
            assert await outcome(call, "stream") == "OK" and not server.failures
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.system
def test_tokenizing_for_its_own_sake_is_bounded_and_apart(tmp_path: Path) -> None:
    """Many calls of Tokenize do not hold up requests, which are tokenized on other threads."""
    release = threading.Event()

    async def main() -> None:
        async with running(tmp_path) as server:
            tokenizer = server.service.prompts.tokenizer
            decode = tokenizer.decode
            tokenizer.decode = lambda ids: (release.wait(60), decode(ids))[1]  # type: ignore[method-assign]
            request = inference_pb2.DetokenizeRequest(token_ids=[1])
            calls = [server.inference.Detokenize(request) for _ in range(MAX_TOKENIZE_CALLS + 3)]
            tasks = [asyncio.create_task(outcome(call, "unary")) for call in calls]
            while sum(task.done() for task in tasks) < 3:
                await asyncio.sleep(0.001)
            messages = [inference_pb2.ChatMessage(role="u", content="hi")]
            chat = inference_pb2.ChatRequest(messages=messages, sampling=sampling(1))
            assert await outcome(server.inference.Chat(chat), "unary") == "OK"
            release.set()
            outcomes = await asyncio.gather(*tasks)
            assert (
                outcomes.count("RESOURCE_EXHAUSTED") == 3
                and outcomes.count("OK") == MAX_TOKENIZE_CALLS
            )

    asyncio.run(main())


def test_priorities(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, max_batch=1) as server:
            order: list[int] = []

            async def one(priority: int) -> None:
                await outcome(start(server, "unary", request_id="", priority=priority), "unary")
                order.append(priority)

            with server.holding(step=2):
                calls = [asyncio.create_task(one(0))]
                await until(lambda: server.runner.steps)
                calls += [asyncio.create_task(one(priority)) for priority in (5, 3, 1)]
                await until(lambda: len(server.service._answers) == 4)
            await asyncio.gather(*calls)
            assert order == [0, 1, 3, 5]
            await server.at_rest()

    asyncio.run(main())
