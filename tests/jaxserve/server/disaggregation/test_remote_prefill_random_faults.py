"""Hundreds of requests, while networks cut and stall and clients go away."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from grpc import aio

from jaxserve.server.disaggregation.prefill_pool import State
from tests.jaxserve.cluster.transfer.harness import Proxy
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

AT_ONCE = 25  # requests
SALTS = 100
TEXTS = [f"{i % 7}{LONG[: 100 + i]}" for i in range(90)]


@pytest.mark.system
@pytest.mark.parametrize("requests", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_faults_leave_nothing_behind(
    tmp_path: Path, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared prefixes and two prefill servers."""
    for pause in ("RETRY_SECONDS", "REST_SECONDS"):
        monkeypatch.setattr(f"jaxserve.server.disaggregation.prefill_pool.{pause}", 0.05)

    async def main() -> None:
        rng = random.Random(3)
        expected = dict(zip(TEXTS, await plain(tmp_path, *map(asking, TEXTS)), strict=True))
        plan = replace(PLAN, seconds=0.5)
        async with apart(
            tmp_path, plan=plan, prefills=2, prefill_seconds=0.001, num_pages=300
        ) as servers:
            for proxy in servers.proxies:
                proxy.limits = lambda: rng.choice((1e9, rng.uniform(0, 60_000)))
                proxy.cut()  # the connections that there are have no limit
            before = len(asyncio.all_tasks())
            clients = Clients(servers, expected, rng)
            disturbing = asyncio.create_task(disturb(servers.proxies, rng))
            for _ in range(requests // AT_ONCE):
                await until(lambda: servers.states.get("ready"))
                await asyncio.gather(*(clients.ask() for _ in range(AT_ONCE)))
            disturbing.cancel()
            clients.check(requests)
            await servers.at_rest()
            await serves_on(servers, tmp_path)
            pumps = sum(len(proxy._tasks) for proxy in servers.proxies)
            await until(lambda: len(asyncio.all_tasks()) - pumps <= before)

    asyncio.run(main())


@dataclass
class Clients:
    """Clients of the decode server: some have a short deadline, and some go away.

    expected: token ids by text. outcomes: counts by name of the status.
    """

    servers: Apart
    expected: Mapping[str, list[int]]
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)

    async def ask(self) -> None:
        """Ask for one text, and check the tokens where an answer comes."""
        text = self.rng.choice(TEXTS)
        timeout = self.rng.choice((None, None, 5.0, 0.05))
        request = asking(text, cache_salt=str(self.rng.randrange(SALTS)))
        call = self.servers.decode.inference.Generate(request, timeout=timeout)
        if self.rng.random() < 0.1:
            asyncio.get_running_loop().call_later(self.rng.random() / 10, call.cancel)
        try:
            assert tokens_of(await call) == self.expected[text]
        except aio.AioRpcError:
            pass
        except asyncio.CancelledError:
            assert call.cancelled()
        self.outcomes[(await call.code()).name] += 1

    def check(self, requests: int) -> None:
        """Check that all kinds of endings happened, and no others."""
        endings = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
        assert self.outcomes.keys() <= endings, self.outcomes
        assert self.outcomes["OK"] > requests / 3, self.outcomes
        remote = self.servers.decisions("remote")
        failures = self.servers.failures
        assert requests / 5 < remote > sum(failures.values()), (remote, failures)
        assert len(failures) > 1, failures


async def disturb(proxies: Sequence[Proxy], rng: random.Random) -> None:
    """Cut connections, one in two of them after a silence."""
    while True:
        await asyncio.sleep(rng.random() / 5)
        proxy = rng.choice(proxies)
        if rng.random() < 0.5:
            proxy.frozen.set()
            try:
                await asyncio.sleep(rng.random() / 5)
            finally:
                # Also when the test cancels this: a frozen proxy never comes back.
                proxy.frozen.clear()
        proxy.cut()


async def serves_on(servers: Apart, folder: Path) -> None:
    """Check that one more prompt is computed by a prefill server, over good connections."""
    for proxy in servers.proxies:
        proxy.limits = lambda: 1e9
        proxy.cut()
    await servers.until(State.READY, 0)
    await servers.until(State.READY, 2)
    servers.decode.service._page_fetches._fetcher._seconds = PLAN.seconds
    for role in servers.prefill_roles:
        role._servicer._seconds = PLAN.seconds
    remote = servers.count("seconds_count")
    answer = await servers.decode.inference.Generate(asking())
    (expected,) = await plain(folder, asking())
    assert tokens_of(answer) == expected
    assert servers.count("seconds_count") == remote + 1, "it serves on"
    await servers.at_rest()
