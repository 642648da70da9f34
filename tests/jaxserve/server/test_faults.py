"""Injected faults: their effect on the request, on other requests, and on the server."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jaxserve.server.harness import Running, running
from tests.jaxserve.server.test_endings import KINDS, ok, outcome, start

Fault = Callable[[], None]
SECRET = "a path of the server's: /etc/keys"


class Broken:
    """A method that triggers the fault before its n-th call."""

    def __init__(self, owner: Any, name: str, number: int, fault: Fault):
        self._method = getattr(owner, name)
        self._calls_left = number
        self._fault = fault
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls_left -= 1
        if self._calls_left == 0:
            self._fault()
        return self._method(*args, **kwargs)


def explode() -> None:
    raise RuntimeError(SECRET)


def dawdle() -> None:
    time.sleep(0.1)


PLACES: dict[
    str, Callable[[Running], tuple[Any, str, int]]
] = {  # whose method, and which of its calls
    "launch": lambda server: (server.runner, "launch", 4),
    "collect": lambda server: (server.runner, "collect", 4),
    "commit": lambda server: (server.engine.scheduler, "commit", 4),
    "page.alloc": lambda server: (server.engine.scheduler.lanes[0].caches[0].pool, "allocate", 2),
    "tokenizer.encode": lambda server: (server.service.prompts.tokenizer, "encode", 1),
    **{  # the prompt's two ends are read first, then the first token, and so on
        f"tokenizer.decode, call {n}": lambda server, n=n: (
            server.service.prompts.tokenizer,
            "token_bytes",
            n,
        )
        for n in (1, 2, 3, 4, 5, 6, 7, 8, 20)
    },
}
OF_THE_REQUEST = tuple(place for place in PLACES if place.startswith("tokenizer"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception(
    tmp_path: Path, kind: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault in the tokenizer ends its request with INTERNAL; one in the engine ends them all."""

    async def main() -> None:
        async with running(tmp_path, max_batch=8, prefix_cache=False) as server:
            Broken(*PLACES[place](server), explode)
            call = start(server, kind)
            name = await outcome(call, kind)
            details = await call.details()
            assert SECRET not in details and "Traceback" not in details
            if place in OF_THE_REQUEST:
                assert name == "INTERNAL" and details.startswith("internal error (incident ")
                incident = details.split()[-1].rstrip(")")
                assert any(incident in record.getMessage() for record in caplog.records)
                await server.at_rest()
                assert await ok(server, kind) == "OK"
                await server.at_rest()
            else:
                assert name == "UNAVAILABLE" and len(server.failures) == 1
                assert await ok(server, "unary") == "UNAVAILABLE"

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_delay(tmp_path: Path, kind: str, place: str) -> None:
    async def main() -> None:
        async with running(tmp_path, max_batch=8, prefix_cache=False) as server:
            Broken(*PLACES[place](server), dawdle)
            assert await ok(server, kind) == "OK"
            await server.at_rest()

    asyncio.run(main())


def test_an_observer_that_fails_costs_one_request_at_most(tmp_path: Path) -> None:
    class Bad:
        def refused(self, call: Any, error: Any) -> None: ...
        def stepped(self, event: Any) -> None: ...
        def ended(self, answer: Any, error: Any) -> None: ...
        def received(self, answer: Any, tokens: int, first: bool, seconds: float) -> None:
            if answer.id == "one":
                explode()

    async def main() -> None:
        async with running(tmp_path, max_batch=8, observers=(Bad(),)) as server:
            other = asyncio.create_task(
                outcome(start(server, "stream", request_id="other"), "stream")
            )
            assert await ok(server, "unary") == "INTERNAL"
            assert await other == "OK"
            await server.at_rest()

    asyncio.run(main())
