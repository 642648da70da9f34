"""Phases of a server: loading, ready, draining, failed."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.cluster.heartbeat import PodFailure
from jaxserve.errors import ConfigError, RestartingError
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.server import INFERENCE, Health, bind, new_server
from jaxserve.server.lifecycle import FAILED, Lifecycle
from jaxserve.server.readiness import Phase
from jaxserve.server.security.auth import BearerTokens
from jaxserve.v1 import admin_pb2, inference_pb2
from tests.jaxserve.server.harness import MODEL, Running, running, until
from tests.jaxserve.server.test_endings import outcome, start

Connectivity = grpc.ChannelConnectivity
Status = health_pb2.HealthCheckResponse.ServingStatus
STACKS = "Current thread"  # in a dump of the stacks of all threads


async def health(server: Running, service: str = INFERENCE) -> str:
    stub = health_pb2_grpc.HealthStub(server.channel)
    return Status.Name((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


@contextlib.asynccontextmanager
async def living(
    server: Running, **times: float
) -> AsyncIterator[tuple[Lifecycle, "asyncio.Task[int]"]]:
    """Run the lifecycle of a loaded server; yield it and its task, which returns the exit code."""

    times = {"drain_timeout": 600.0} | times
    lifecycle = Lifecycle(server.readiness, server.process.listeners, **times)
    server.failed = lifecycle.fail
    server.drain = lifecycle.drain
    task = asyncio.create_task(lifecycle.run(lambda: server.served))
    await until(lambda: server.readiness.phase is Phase.READY)
    yield lifecycle, task
    task.cancel()


def test_loading_is_unavailable(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, opened=False) as server:
            assert await health(server, "") == "SERVING"
            assert await health(server) == "NOT_SERVING"
            call = start(server, "unary")
            assert await outcome(call, "unary") == "UNAVAILABLE"
            assert int(dict(await call.trailing_metadata())["grpc-retry-pushback-ms"]) == 5000
            server.open()
            while await health(server) != "SERVING":
                await asyncio.sleep(0.001)
            assert await outcome(start(server, "unary"), "unary") == "OK"

    asyncio.run(main())


@pytest.mark.parametrize("by", ["signal", "Drain"])
@pytest.mark.parametrize("kind", ["unary", "stream", "n=4"])
def test_draining_finishes_what_runs_and_sends_the_rest_elsewhere(
    tmp_path: Path, kind: str, by: str
) -> None:
    """The client hears of it at once, while its call goes on."""

    async def main() -> None:
        async with (
            running(tmp_path, opened=False) as server,
            living(server) as (lifecycle, task),
        ):
            with server.holding(step=3):
                call = start(server, kind)
                await until(lambda: server.runner.steps == 3)
                if by == "signal":
                    lifecycle.drain()
                else:
                    assert (await server.admin.Drain(admin_pb2.DrainRequest())).requests == 1
                # GOAWAY; the channel looks for another server, and there is none.
                await until(lambda: server.channel.get_state() is not Connectivity.READY)
                late = start(server, "unary", request_id="late")
                assert await outcome(late, "unary") == "UNAVAILABLE"
                assert "late" not in server.runner.launches
            assert await outcome(call, kind) == "OK"
            assert await task == 0

    asyncio.run(main())


def test_nobody_who_watches_the_health_holds_up_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, opened=False) as server,
            living(server) as (lifecycle, task),
        ):
            stub = health_pb2_grpc.HealthStub(server.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
            assert (await watch.read()).status == Status.SERVING
            lifecycle.drain()
            assert (await watch.read()).status == Status.NOT_SERVING
            assert await asyncio.wait_for(task, 60) == 0
            assert await watch.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())


def test_watches_that_have_just_been_told_something_end_with_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            stub = health_pb2_grpc.HealthStub(server.channel)
            watches = [
                stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE)) for _ in range(50)
            ]
            assert {(await watch.read()).status for watch in watches} == {Status.SERVING}
            server.process.listeners.tell(Phase.DRAINING)
            assert {(await watch.read()).status for watch in watches} == {Status.NOT_SERVING}
            await asyncio.wait_for(server.stop(600), 60)
            assert {await asyncio.wait_for(watch.code(), 60) for watch in watches} == {
                grpc.StatusCode.UNAVAILABLE
            }

    asyncio.run(main())


class _SlowWatcher:
    """Context of a watch whose first message is under way until it is let through."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.let_through = asyncio.Event()
        self.code: grpc.StatusCode | None = None

    async def write(self, message: health_pb2.HealthCheckResponse) -> None:
        self.statuses.append(message.status)
        await self.let_through.wait()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code = code


def test_a_watch_is_told_the_last_status_before_it_ends() -> None:
    async def main() -> None:
        health, context = Health(), _SlowWatcher()
        health.tell(Phase.READY)
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        watch = asyncio.create_task(health.servicer.Watch(request, context))  # type: ignore[arg-type]
        await until(lambda: bool(context.statuses))
        health.tell(Phase.DRAINING)
        health.close()
        context.let_through.set()
        await asyncio.wait_for(watch, 60)
        assert context.statuses == [Status.SERVING, Status.NOT_SERVING]
        assert context.code is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize("kind", ["unary", "stream", "n=4"])
def test_what_does_not_finish_in_time_is_told_so(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, opened=False) as server,
            living(server, drain_timeout=0.1) as (lifecycle, task),
        ):
            with server.holding(step=3) as go_on:
                tell = server.readiness.on_phase

                def on_phase(phase: Phase) -> None:
                    tell(phase)
                    if phase is Phase.ENDED:
                        go_on()  # the server waits for the step in flight

                server.readiness.on_phase = on_phase
                call = start(server, kind)
                await until(lambda: server.runner.steps == 3)
                lifecycle.drain()
                assert await outcome(call, kind) == "UNAVAILABLE"
                assert await task == 0

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize("kind", ["unary", "stream", "n=4"])
def test_a_step_that_hangs_ends_the_server(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, opened=False) as server,
            living(server, step_timeout=0.2) as (_, task),
        ):
            with server.holding(step=4):
                assert await outcome(start(server, kind), kind) == "UNAVAILABLE"
                assert await task == FAILED
                assert server.readiness.phase is Phase.FAILED

    asyncio.run(main())
    assert STACKS in capfd.readouterr().err


def test_a_lost_host_ends_the_server_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Stacks of this process say nothing about another host."""

    async def main() -> None:
        async with running(tmp_path, opened=False) as server, living(server) as (lifecycle, task):
            server.process.lifecycle = lifecycle
            server.process.on_host_lost(PodFailure("host 1 is gone (Connection\nreset by peer)"))
            assert await task == FAILED

    with caplog.at_level("CRITICAL"):
        asyncio.run(main())
    (record,) = caplog.records
    assert record.getMessage() == "the server ends: host 1 is gone (Connection reset by peer)"
    assert record.exc_info is None and STACKS not in capfd.readouterr().err


def test_an_engine_that_fails_ends_the_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def explode(number: int) -> None:
        if number == 4:
            raise RuntimeError("the device died")

    async def main() -> None:
        async with running(tmp_path, opened=False) as server, living(server) as (_, task):
            server.runner.hook = explode
            assert await outcome(start(server, "stream"), "stream") == "UNAVAILABLE"
            assert await task == FAILED

    asyncio.run(main())
    assert STACKS not in capfd.readouterr().err


@pytest.mark.system
@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_an_engine_that_is_lost_while_draining(tmp_path: Path, how: str) -> None:
    """Clients and the exit code report the failure, not the drain."""
    release = threading.Event()

    def lose(number: int) -> None:
        if number == 8:
            if how == "fails":
                raise RuntimeError("the device died")
            release.wait()

    async def main() -> None:
        async with (
            running(tmp_path, seconds=0.01, opened=False) as server,
            living(server, step_timeout=0.2) as (lifecycle, task),
        ):
            server.runner.hook = lose
            call = start(server, "stream")
            try:
                await until(lambda: server.runner.steps >= 3)
                lifecycle.drain()
                assert await outcome(call, "stream") == "UNAVAILABLE"
                assert "engine has failed" in await call.details()
                assert await task == FAILED
            finally:
                release.set()

    asyncio.run(main())


def test_drain_while_loading_ends_at_once(tmp_path: Path) -> None:
    begun = threading.Event()
    release = threading.Event()
    codes: list[int] = []

    async def main() -> None:
        async with running(tmp_path, opened=False) as server:

            def load() -> Any:
                begun.set()
                release.wait(60)
                return server.served

            def leave(code: int) -> None:
                codes.append(code)
                release.set()  # a process would be gone

            lifecycle = Lifecycle(server.readiness, server.process.listeners, exit=leave)
            task = asyncio.create_task(lifecycle.run(load))
            await until(begun.is_set)
            lifecycle.drain()
            await asyncio.wait_for(task, 60)
            assert codes == [0]

    asyncio.run(main())


def test_a_failure_while_loading_is_no_drain(tmp_path: Path) -> None:
    """A supervisor starts the server again."""
    codes: list[int] = []
    release = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        release.set()  # a process would be gone

    async def main() -> None:
        async with running(tmp_path, opened=False) as server:

            def load() -> Any:
                release.wait(60)
                return server.served

            lifecycle = Lifecycle(server.readiness, server.process.listeners, exit=leave)
            task = asyncio.create_task(lifecycle.run(load))
            await asyncio.sleep(0)
            lifecycle.fail(RestartingError("host 1 is gone"))
            await asyncio.wait_for(task, 60)
            assert codes == [FAILED]

    asyncio.run(main())


def test_a_failure_while_clients_read_their_last_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with running(tmp_path, opened=False) as server, living(server) as (lifecycle, task):
            stop = server.process.listeners.stop

            async def fail_and_stop(grace: float) -> None:
                monkeypatch.undo()
                lifecycle.fail(RestartingError("host 1 is gone"))
                await stop(grace)

            monkeypatch.setattr(server.process.listeners, "stop", fail_and_stop)
            lifecycle.drain()
            assert await task == FAILED

    asyncio.run(main())


def test_a_signal_while_a_failure_is_told(tmp_path: Path) -> None:
    codes: list[int] = []

    async def main() -> None:
        async with running(tmp_path, opened=False) as server, living(server) as (lifecycle, task):
            lifecycle.exit = codes.append
            lifecycle.watch_signals()
            lifecycle.fail(RestartingError("host 1 is gone"))
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: codes)
            assert codes == [FAILED] and await task == FAILED

    asyncio.run(main())


def test_what_load_raises_passes_through(tmp_path: Path) -> None:
    def load() -> Any:
        raise ConfigError("--max-batch 0")

    async def main() -> None:
        async with running(tmp_path, opened=False) as server:
            with pytest.raises(ConfigError, match="--max-batch"):
                await Lifecycle(server.readiness, server.process.listeners).run(load)

    asyncio.run(main())


def test_a_port_is_not_shared(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            port = int(server.address.rsplit(":")[1])
            other = new_server(Limits(), BearerTokens(), Health(), None, None)
            with pytest.raises(ConfigError, match=f"--port is {port}; nothing can listen"):
                bind(other, "127.0.0.1", port, None, "--port")
            await other.stop(0)

    asyncio.run(main())


TOKENS = BearerTokens(("c-token",), admin="a-token")


@pytest.mark.parametrize(
    "token, generate, admin",
    [
        (None, "UNAUTHENTICATED", "UNAUTHENTICATED"),
        ("Bearer wrong", "UNAUTHENTICATED", "UNAUTHENTICATED"),
        ("c-token", "UNAUTHENTICATED", "UNAUTHENTICATED"),
        ("Bearer c-token", "OK", "PERMISSION_DENIED"),
        ("Bearer a-token", "OK", "OK"),
    ],
)
def test_tokens(tmp_path: Path, token: str | None, generate: str, admin: str) -> None:
    async def main() -> None:
        async with running(tmp_path, tokens=TOKENS) as server:
            metadata = [("authorization", token)] if token else []
            request = inference_pb2.TokenizeRequest(text="x")
            assert await code(server.inference.Tokenize(request, metadata=metadata)) == generate
            question = admin_pb2.GetModelInfoRequest()
            assert await code(server.admin.GetModelInfo(question, metadata=metadata)) == admin
            assert await health(server) == "SERVING"
            stream = server.inference.GenerateStream(
                inference_pb2.GenerateStreamRequest(text="x"), metadata=metadata, timeout=60
            )
            await stream.read() if generate == "OK" else None
            assert generate == "OK" or await code(_all(stream)) == generate

    asyncio.run(main())


def test_a_call_without_a_token_ends_before_its_message_is_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, tokens=TOKENS) as server:
            name = "/jaxserve.v1.InferenceService/Tokenize"
            call = server.channel.stream_stream(name)(timeout=60)
            # No message is sent: a handler that waits for one would wait until the deadline.
            assert await code(call.read()) == "UNAUTHENTICATED"

    asyncio.run(main())


def test_a_call_with_two_tokens_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, tokens=TOKENS) as server:
            metadata = [("authorization", f"Bearer {token}") for token in ("c-token", "a-token")]
            request = inference_pb2.TokenizeRequest(text="x")
            call = server.inference.Tokenize(request, metadata=metadata)
            assert await code(call) == "UNAUTHENTICATED"

    asyncio.run(main())


def test_pages_are_counted_before_the_first_step(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            loads = await server.admin.GetLoads(admin_pb2.GetLoadsRequest())
            pools = [c.pool for lane in server.engine.scheduler.lanes for c in lane.caches]
            assert loads.pages_total == sum(pool.num_pages for pool in pools) > 0
            assert loads.pages_used == 0

    asyncio.run(main())


async def _all(stream: Any) -> None:
    async for _ in stream:
        pass


async def code(call: Any) -> str:
    try:
        await call
    except aio.AioRpcError as error:
        return error.code().name
    return grpc.StatusCode.OK.name


def test_admin_without_a_token_of_its_own_is_closed_to_clients() -> None:
    BearerTokens().check([], admin=True)
    with pytest.raises(Exception, match="admin's token"):
        BearerTokens(("c",)).check(["Bearer c"], admin=True)


def test_admin_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, seconds=0.01) as server:
            model = await server.admin.GetModelInfo(admin_pb2.GetModelInfoRequest())
            assert (model.name, model.vocab_size) == (MODEL.name, MODEL.vocab_size)
            info = await server.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
            assert info.limits["max_waiting_requests"] == Limits().max_waiting_requests
            assert info.compiles_after_ready == 0
            call = start(server, "n=4")
            while (loads := await server.admin.GetLoads(admin_pb2.GetLoadsRequest())).running < 4:
                await asyncio.sleep(0.001)
            assert loads.requests == 1 and 0 < loads.pages_used < loads.pages_total
            assert await outcome(call, "n=4") == "OK"
            await server.at_rest()
            pool = server.engine.scheduler.lanes[0].caches[0].pool
            assert pool._idle
            await server.admin.FlushCache(admin_pb2.FlushCacheRequest())
            assert not pool._idle
            with pytest.raises(aio.AioRpcError, match="--profile-dir"):
                await server.admin.StartProfile(admin_pb2.StartProfileRequest())

    asyncio.run(main())
