"""Profiles: one at a time, for a bounded time, in a bounded place."""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import pytest
from grpc import aio

from jaxserve.errors import ConfigError, RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.admin import AdminServicer
from jaxserve.server.grpc.server import Health, bind, new_server
from jaxserve.server.observe.profiler import MAX_PROFILES, Profiler
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.auth import BearerTokens
from jaxserve.v1 import admin_pb2
from jaxserve.v1.admin_pb2_grpc import AdminServiceStub
from tests.jaxserve.server.harness import until


def traces(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).rglob("*.trace.json.gz"))


def busy() -> None:
    jax.jit(lambda x: x @ x)(jnp.ones((64, 64))).block_until_ready()


@asynccontextmanager
async def profiler(folder: Path | None) -> AsyncIterator[Profiler]:
    found = Profiler(folder)
    try:
        yield found
    finally:
        await found.close()


def test_over_grpc(tmp_path: Path) -> None:
    """A profile has a folder of its own, and a second one at the same time is refused."""

    async def main() -> None:
        async with profiler(tmp_path / "new" / "profiles") as found:
            server = new_server(
                Limits(),
                BearerTokens(),
                Health(False),
                None,
                AdminServicer(Readiness(), found, lambda: None),
            )
            port = bind(server, "127.0.0.1", 0, None, "--port")
            await server.start()
            async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                admin = AdminServiceStub(channel)
                with pytest.raises(aio.AioRpcError, match="no profile is being written") as caught:
                    await admin.StopProfile(admin_pb2.StopProfileRequest())
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                folder = (
                    await admin.StartProfile(admin_pb2.StartProfileRequest(max_seconds=60))
                ).folder
                with pytest.raises(
                    aio.AioRpcError, match=f"a profile is being written to {folder}"
                ) as caught:
                    await admin.StartProfile(admin_pb2.StartProfileRequest())
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                await asyncio.to_thread(busy)
                assert (await admin.StopProfile(admin_pb2.StopProfileRequest())).folder == folder
                again = (
                    await admin.StartProfile(admin_pb2.StartProfileRequest(max_seconds=60))
                ).folder
                await admin.StopProfile(admin_pb2.StopProfileRequest())
                assert again != folder, "within a second, too"
            await server.stop(0)
        assert Path(folder).parent == tmp_path / "new" / "profiles"
        (trace,) = traces(folder)
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert any("dot" in event.get("name", "") for event in events)

    asyncio.run(main())


@pytest.mark.system
def test_it_ends_by_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with profiler(tmp_path) as found:
            folder = await found.start(0.2)
            began = time.monotonic()
            await until(lambda: traces(folder))
            assert time.monotonic() - began > 0.2
            await found.start()  # another one may begin
        assert len(list(tmp_path.iterdir())) == 2, "close ended it"
        assert len(traces(tmp_path)) == 2

    asyncio.run(main())


@pytest.mark.system
def test_a_client_that_leaves_does_not_make_it_endless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile whose client left while it began is known to the server, and ends."""
    begun = threading.Event()
    go = threading.Event()
    monkeypatch.setattr(jax.profiler, "start_trace", held(jax.profiler.start_trace, begun, go))

    async def main() -> None:
        async with profiler(tmp_path) as found:
            call = asyncio.create_task(found.start(0.1))
            await until(begun.is_set)
            call.cancel()
            await asyncio.sleep(0)
            go.set()
            await until(lambda: traces(tmp_path))
            with pytest.raises(ConfigError, match="no profile"):
                await found.stop()

    asyncio.run(main())


def held(
    function: Callable[..., Any], begun: threading.Event, go: threading.Event
) -> Callable[..., Any]:
    def waiting(*args: Any) -> Any:
        begun.set()
        go.wait(60)
        return function(*args)

    return waiting


def test_the_time_of_one_does_not_end_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile's time passes while it is being stopped and another one waits to begin."""
    begun = threading.Event()
    go = threading.Event()
    monkeypatch.setattr(jax.profiler, "stop_trace", held(jax.profiler.stop_trace, begun, go))

    async def main() -> None:
        async with profiler(tmp_path) as found:
            first = Path(await found.start(60))
            stopping = asyncio.create_task(found.stop())
            await until(begun.is_set)
            found._expire(first)
            starting = asyncio.create_task(found.start(60))
            await asyncio.sleep(0.01)
            go.set()
            await stopping
            second = await starting
            await asyncio.gather(*found._tasks)
            assert await found.stop() == second

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [0.0, -1.0, 60.1, float("nan"), float("inf")])
def test_the_time_is_bounded(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(RequestError, match=r"max_seconds is .*; it must be above 0 and at most 60"):
        asyncio.run(Profiler(tmp_path).start(seconds))
    assert not list(tmp_path.iterdir())


def test_the_place_is_bounded(tmp_path: Path) -> None:
    for number in range(MAX_PROFILES):
        (tmp_path / str(number)).mkdir()
    with pytest.raises(
        ConfigError, match=r"it has 32 entries, and the limit is 32 \(remove some\)"
    ):
        asyncio.run(Profiler(tmp_path).start())
    assert len(list(tmp_path.iterdir())) == MAX_PROFILES


def test_without_a_place_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start it with --profile-dir DIR"):
        asyncio.run(Profiler(None).start())
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        ConfigError, match=f"--profile-dir is {file}; no profile can be written: File exists"
    ):
        asyncio.run(Profiler(file).start())


def test_nothing_begins_when_the_server_ends(tmp_path: Path) -> None:
    async def main() -> None:
        found = Profiler(tmp_path)
        await found.close()
        with pytest.raises(ConfigError):
            await found.start()

    asyncio.run(main())
