"""Which calls are made again: a server that fails as its script says, and then answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from jaxserve.client import CallError, Client, PromptInfo, SamplingParams, retrying
from jaxserve.client.connection import Connection
from jaxserve.client.retrying import Attempts
from jaxserve.errors import (
    AbortedError,
    ConfigError,
    DrainingError,
    JaxserveError,
    QueueFullError,
    RequestError,
    SlowConsumerError,
)
from jaxserve.server.core.status import trailers
from jaxserve.v1 import admin_pb2_grpc, inference_pb2_grpc
from jaxserve.v1 import inference_pb2 as pb
from tests.jaxserve.client.test_client import Looping, Waiting, opened
from tests.jaxserve.server.harness import until

Fails = Callable[[grpc.ServicerContext], None]


def refuse(error: JaxserveError) -> Fails:
    def fail(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(trailers(error))
        context.abort(grpc.StatusCode[error.code], str(error))

    return fail


def bare(code: grpc.StatusCode, pushback: str | None = None, details: str = "no") -> Fails:
    """Return a failure as a proxy or the library raises it."""

    def fail(context: grpc.ServicerContext) -> None:
        if pushback is not None:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", pushback),))
        context.abort(code, details)

    return fail


FULL = refuse(QueueFullError("9 requests wait already", 0.15))
FULL_FOR_LONG = refuse(QueueFullError("9 requests wait already", retrying.LONGEST))
AWAY = bare(grpc.StatusCode.UNAVAILABLE)
UNSEEN = bare(grpc.StatusCode.CANCELLED, details="CANCELLED")  # as gRPC's own library ends it


@dataclass
class Scripted(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """first: what happens to the calls, one after the other. then: what happens to a stream after
    its first message.
    """

    first: list[Fails]
    then: Fails | None = None
    times: list[float] = field(default_factory=list)
    address: str = ""

    def _enter(self, context: grpc.ServicerContext) -> None:
        self.times.append(time.monotonic())
        if len(self.times) <= len(self.first):
            self.first[len(self.times) - 1](context)

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> pb.GenerateResponse:
        self._enter(context)
        return pb.GenerateResponse(request_id="done")

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self._enter(context)
        yield pb.GenerateStreamResponse(prompt_info=pb.PromptInfo(request_id="done"))
        if self.then:
            self.then(context)
        yield pb.GenerateStreamResponse(finish_info=pb.FinishInfo())

    def Drain(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._enter(context)


@contextmanager
def served(*first: Fails, then: Fails | None = None, **options: int) -> Iterator[Scripted]:
    servicer = Scripted(list(first), then)
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(
            pool, options=[(f"grpc.{name}", value) for name, value in options.items()]
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
        servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield servicer
        finally:
            server.stop(0).wait()


@asynccontextmanager
async def asking(kind: type, server: Scripted, **given: Any) -> AsyncIterator[Callable[..., Any]]:
    """Yield a function that makes a call and returns the answer's request id, "done"."""
    client, method = kind

    async def unary(prompt: str = "x", **given: Any) -> str:
        return (await opened_client.generate(prompt, **given)).request_id

    async def stream(prompt: str = "x", **given: Any) -> str:
        info, _ = await opened_client.events("stream", prompt, **given)
        assert isinstance(info, PromptInfo)
        return info.request_id

    async with opened(client, server.address, **given) as opened_client:
        yield unary if method == "unary" else stream


every = pytest.mark.parametrize(
    "kind",
    [(client, method) for client in (Waiting, Looping) for method in ("unary", "stream")],
    ids=["sync", "sync-stream", "async", "async-stream"],
)


@pytest.fixture(autouse=True)
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds before each attempt but the first; a back-off is short."""
    monkeypatch.setattr(retrying, "FIRST_BACKOFF", 0.02)
    found: list[float] = []
    next_delay = Attempts.next_delay

    def noted(attempts: Attempts, failure: grpc.RpcError) -> float:
        found.append(next_delay(attempts, failure))
        return found[-1]

    monkeypatch.setattr(Attempts, "next_delay", noted)
    return found


@pytest.mark.system
@every
def test_a_refused_call_comes_back_when_it_is_told_to(kind: Any, delays: list[float]) -> None:
    async def main() -> None:
        with served(FULL, FULL) as server:
            async with asking(kind, server) as ask:
                assert await ask() == "done"
            first, second, third = server.times
            assert delays == [0.15, 0.15] and min(second - first, third - second) >= 0.15

    asyncio.run(main())


@pytest.mark.system
@every
def test_without_a_time_to_come_back_only_the_unavailable_is_asked_again(
    kind: Any, delays: list[float]
) -> None:
    async def main() -> None:
        with served(AWAY, AWAY, AWAY) as server:
            async with asking(kind, server) as ask:
                assert await ask() == "done"
            gaps = [b - a for a, b in pairwise(server.times)]
            assert all(gap >= delay for gap, delay in zip(gaps, delays, strict=True))
            assert [delay / 0.02 for delay in delays] == pytest.approx([1, 2, 4], rel=0.2)
        with served(bare(grpc.StatusCode.RESOURCE_EXHAUSTED)) as server:
            async with asking(kind, server) as ask:
                with pytest.raises(CallError) as caught:
                    await ask()
            assert caught.value.code == "RESOURCE_EXHAUSTED" and len(server.times) == 1

    asyncio.run(main())


@every
def test_a_call_that_reached_a_server_as_it_ended_is_made_again(kind: Any) -> None:
    """No service saw it: gRPC's library ended it so (grpc/grpc#41785)."""

    async def main() -> None:
        with served(UNSEEN, UNSEEN) as server:
            async with asking(kind, server) as ask:
                assert await ask() == "done"
            assert len(server.times) == 3

    asyncio.run(main())


NEVER = {
    "a wrong request": (refuse(RequestError("text", "is wrong")), RequestError),
    "a slow reader": (refuse(SlowConsumerError("is slow")), SlowConsumerError),
    "told not to": (bare(grpc.StatusCode.UNAVAILABLE, "-1"), CallError),
    "told nonsense": (bare(grpc.StatusCode.UNAVAILABLE, "soon"), CallError),
    "too far away": (bare(grpc.StatusCode.UNAVAILABLE, "3600000"), CallError),
    "internal": (bare(grpc.StatusCode.INTERNAL), CallError),
    "aborted": (refuse(AbortedError("was aborted")), AbortedError),
    "cancelled by the server": (bare(grpc.StatusCode.CANCELLED), CallError),
}


@pytest.mark.parametrize("name", NEVER)
def test_never_again(name: str) -> None:
    fail, error = NEVER[name]

    async def main() -> None:
        for kind in ((Waiting, "unary"), (Looping, "unary"), (Looping, "stream")):
            with served(fail) as server:
                async with asking(kind, server) as ask:  # type: ignore[arg-type]
                    with pytest.raises(error) as caught:
                        await ask()
                assert type(caught.value) is error and len(server.times) == 1

    asyncio.run(main())


@pytest.mark.parametrize("client", [Waiting, Looping], ids=["sync", "async"])
@pytest.mark.parametrize(
    "then", [refuse(SlowConsumerError("is slow")), FULL, AWAY], ids=["slow", "full", "away"]
)
def test_not_after_the_first_message(client: type, then: Fails) -> None:
    async def main() -> None:
        with served(then=then) as server:
            async with asking((client, "stream"), server) as ask:  # type: ignore[arg-type]
                with pytest.raises(JaxserveError):
                    await ask()
            assert len(server.times) == 1

    asyncio.run(main())


@every
def test_the_number_of_attempts_is_bounded(kind: Any) -> None:
    async def main() -> None:
        for retries in (0, 2):
            with served(*[AWAY] * 9) as server:
                async with asking(kind, server, retries=retries) as ask:
                    with pytest.raises(CallError) as caught:
                        await ask()
                assert caught.value.code == "UNAVAILABLE" and len(server.times) == 1 + retries
        with served(FULL) as server:
            async with asking(kind, server, retries=0) as ask:
                with pytest.raises(QueueFullError) as full:
                    await ask()
            assert full.value.retry_after == 0.15 and len(server.times) == 1

    asyncio.run(main())


@every
def test_a_deadline_bounds_it_all(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that would pass it is not begun: the reason is told at once."""
    clock = [0.0]
    next_delay = Attempts.next_delay

    def passed(attempts: Attempts, failure: grpc.RpcError) -> float:
        """Let the time of a delay pass on the clock alone."""
        clock[0] += next_delay(attempts, failure)
        return 0.0

    monkeypatch.setattr(Attempts, "next_delay", passed)
    monkeypatch.setattr(retrying, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def main() -> None:
        for timeout, attempts in ((retrying.LONGEST, 1), (3 * retrying.LONGEST - 1, 3)):
            with served(*[FULL_FOR_LONG] * 9) as server:
                async with asking(kind, server, retries=9) as ask:
                    with pytest.raises(QueueFullError):
                        await ask(timeout=timeout)
                assert len(server.times) == attempts

    asyncio.run(main())


def test_drain_is_asked_once() -> None:
    with (
        served(refuse(DrainingError("is about to end")), AWAY) as server,
        Client(server.address) as client,
    ):
        with pytest.raises(DrainingError):
            client.drain()
        with pytest.raises(CallError):
            client.drain()
        assert len(server.times) == 2


def test_long_prompts_are_retried_and_too_long_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC's own policy does the opposite."""
    calls = []
    wait = Connection.wait
    monkeypatch.setattr(Connection, "wait", lambda *given: calls.append(given) or wait(*given))
    with served(FULL, max_receive_message_length=2**20) as server, Client(server.address) as client:
        assert (
            client.generate("x" * 600_000).request_id == "done"
            and len(server.times) == len(calls) == 2
        )
        with pytest.raises(CallError, match="larger than max") as caught:
            client.generate("x" * 2_000_000)
        assert caught.value.code == "RESOURCE_EXHAUSTED" and len(calls) == 3


def test_a_stream_that_is_closed_while_it_waits_ends(delays: list[float]) -> None:
    async def main() -> None:
        with served(*[FULL_FOR_LONG] * 2) as server, Client(server.address) as client:
            async with Looping(server.address) as other:
                streams = client.stream("x"), other.stream("x", SamplingParams())

                async def read() -> list[Any]:
                    return [event async for event in streams[1]]

                readers = asyncio.gather(asyncio.to_thread(list, streams[0]), read())
                await until(lambda: len(delays) == 2)
                streams[0].close()
                await streams[1].close()
                assert await readers == [[], []]
                assert len(server.times) == 2

    asyncio.run(main())


def test_a_negative_number_of_retries() -> None:
    with pytest.raises(ConfigError, match="retries"):
        Client("127.0.0.1:1", retries=-1)
