"""The soak itself: coroutines that deal actions out, and who reads the servers meanwhile."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import track

from benchmarks.soak import embedding_traffic, grpc_traffic, hang_ups, http_traffic, refusals
from benchmarks.soak.canary import Canary, keep_asking
from benchmarks.soak.metric_series import series, unbounded
from benchmarks.soak.outcomes import Outcomes
from benchmarks.soak.servers import Server
from benchmarks.soak.target import Action, Target, connections
from jaxserve.client import AsyncClient

READY_SECONDS = 600.0
REST_SECONDS = 3.0  # between the last answer and the look at what is left
GENERATION: tuple[Action, ...] = (
    *grpc_traffic.ACTIONS,
    *http_traffic.ACTIONS,
    *hang_ups.ACTIONS,
    *refusals.FOR_GENERATION,
)
EMBEDDINGS: tuple[Action, ...] = (*embedding_traffic.ACTIONS, *refusals.FOR_EMBEDDINGS)
Deal = tuple[Action, Target]


@dataclass
class Result:
    """Findings of a soak.

    Attributes:
        left: By server, what was in use at rest, and steps that were compiled after it was ready.
        new_series: By server, series of metrics that came in the second half.
        series: By server, the number of series in the end.
    """

    outcomes: Outcomes = field(default_factory=Outcomes)
    canary: Canary = field(default_factory=Canary)
    left: dict[str, dict[str, int]] = field(default_factory=dict)
    new_series: dict[str, list[str]] = field(default_factory=dict)
    series: dict[str, int] = field(default_factory=dict)


async def soak(servers: Sequence[Server], minutes: float, clients: int) -> Result:
    """Keep both servers busy for so long, and look what is left.

    Raises:
        ConfigError: A server has ended.
        CallError: A server is not ready in time.
    """
    result = Result()
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(AsyncClient(server.address, retries=0))
            for server in servers
        ]
        await _ready(servers, channels)
        own = await _targets(stack, servers, channels, result.outcomes)
        await result.canary.ask(own[0].http)
        until = time.monotonic() + 60 * minutes
        tasks = [asyncio.create_task(keep_asking(result.canary, own[0], until))]
        for seed in range(clients):
            targets = await _targets(stack, servers, channels, result.outcomes)
            tasks.append(asyncio.create_task(one_client(targets, seed, until)))
        before = await _watch(servers, own, minutes)
        await asyncio.gather(*tasks)
        await asyncio.sleep(REST_SECONDS)
        await _look(result, servers, own, before)
    return result


async def one_client(targets: Sequence[Target], seed: int, until: float) -> None:
    """Do all actions in random order, again and again, one after the other."""
    dice = random.Random(seed)
    generation, embeddings = targets
    deals: list[Deal] = [(action, generation) for action in GENERATION]
    deals += [(action, embeddings) for action in EMBEDDINGS]
    while True:
        for action, target in dice.sample(deals, len(deals)):
            if time.monotonic() >= until:
                return
            await _attempt(action, target, dice)


async def _attempt(action: Action, target: Target, dice: random.Random) -> None:
    target.outcomes.actions[action.__name__] += 1
    try:
        await action(target, dice)
    except Exception as error:  # whatever it is, it was not expected, and the soak goes on
        target.outcomes.note(action.__name__, error)


async def _ready(servers: Sequence[Server], channels: Sequence[AsyncClient]) -> None:
    """Wait until all servers are ready, or one has ended."""
    waiting = asyncio.gather(*(channel.wait_ready(READY_SECONDS) for channel in channels))
    try:
        while not waiting.done():
            await asyncio.wait((waiting,), timeout=1)
            for server in servers:
                server.require_running()
        await waiting
    finally:
        waiting.cancel()


async def _targets(
    stack: AsyncExitStack,
    servers: Sequence[Server],
    channels: Sequence[AsyncClient],
    outcomes: Outcomes,
) -> list[Target]:
    """Return a target for each server, with connections of HTTP of their own."""
    return [
        Target(
            channel,
            await stack.enter_async_context(connections(server.url)),
            server.address,
            outcomes,
        )
        for server, channel in zip(servers, channels, strict=True)
    ]


async def _watch(
    servers: Sequence[Server], targets: Sequence[Target], minutes: float
) -> list[frozenset[str]]:
    """Read the processes once a second; return the series of metrics at half time."""
    began = time.monotonic()
    seconds = int(60 * minutes)
    at_half = list[frozenset[str]]()
    for second in track(range(seconds), description="soaking", console=Console(stderr=True)):
        if second == seconds // 2:
            at_half = [await series(target.http) for target in targets]
        await asyncio.sleep(1)
        for server in servers:
            server.take(time.monotonic() - began)
    return at_half


async def _look(
    result: Result,
    servers: Sequence[Server],
    targets: Sequence[Target],
    before: Sequence[frozenset[str]],
) -> None:
    """Note what is left on servers that nobody calls."""
    for server, target, old in zip(servers, targets, before, strict=True):
        loads = await target.grpc.loads()
        info = await target.grpc.server_info()
        result.left[server.name] = {
            "requests": loads.requests,
            "running": loads.running,
            "waiting": loads.waiting,
            "pages": loads.pages_used,
            "compiles_after_ready": info.compiles_after_ready,
        }
        now = await series(target.http)
        result.series[server.name] = len(now)
        result.new_series[server.name] = unbounded(now - old)
