"""Measuring: every load, by every arrangement in turn."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from benchmarks.disaggregation.handovers import Handovers, handovers_between
from benchmarks.disaggregation.loads import SEED, Load, context_of, loads_of, warm_up
from benchmarks.disaggregation.servers import (
    ARRANGEMENTS,
    Servers,
    connected_caller,
    running_servers,
)
from jaxserve.bench.caller import Caller
from jaxserve.bench.latency import Objective, Spread, Summary, summarize
from jaxserve.bench.loops import Loop
from jaxserve.bench.prompts import RandomPrompts
from jaxserve.client import AsyncClient, ModelInfo

TIMEOUT = 600.0  # seconds of a request


@dataclass(frozen=True)
class Result:
    """Figures of an arrangement under a load.

    rate: of long prompts, per second. gaps: the longest of each short stream. all: of both kinds.
    handovers: None without a decode server.
    """

    arrangement: str
    rate: float
    short: Summary
    gaps: Spread | None
    long: Summary
    all: Summary
    handovers: Handovers | None


class Bench:
    """An arrangement under loads, one after the other."""

    def __init__(self, arrangement: str, servers: Servers, caller: Caller, model: ModelInfo):
        self._arrangement = arrangement
        self._servers = servers
        self._caller = caller
        self._model = model
        self._runs = 0

    async def run(self, load: Load) -> Result:
        """Send a load, and return its figures when all requests have ended."""
        before = await self._servers.counts()
        short = self._loop()
        long = self._loop()
        await asyncio.gather(short.open(load.short), long.open(load.long))
        after = await self._servers.counts()
        return Result(
            arrangement=self._arrangement,
            rate=load.rate,
            short=summarize(short.outcomes, Objective()),
            gaps=Spread.of(max(outcome.itl()) for outcome in short.outcomes if outcome.ok),
            long=summarize(long.outcomes, Objective()),
            all=summarize([*short.outcomes, *long.outcomes], Objective()),
            handovers=handovers_between(before, after) if self._servers.metrics else None,
        )

    def _loop(self) -> Loop:
        """Return a loop whose prompts, and so whose pages, are those of no other run."""
        self._runs += 1
        return Loop(
            self._caller,
            RandomPrompts(self._model.vocab_size, self._model.eos_token_ids, SEED, self._runs),
            TIMEOUT,
        )


@asynccontextmanager
async def running_bench(
    arrangement: str, args: argparse.Namespace, context: int
) -> AsyncIterator[Bench]:
    """Run the servers of an arrangement for the time of a block, and yield its bench."""
    async with (
        running_servers(arrangement, args, context) as servers,
        connected_caller(servers.addresses) as caller,
    ):
        async with AsyncClient(servers.addresses[0]) as client:
            model = await client.model_info()
        yield Bench(arrangement, servers, caller, model)


async def measure(args: argparse.Namespace) -> AsyncIterator[Result]:
    """Yield the result of every load, by every arrangement in turn.

    A few requests that do not count come first.
    """
    context = context_of(args.model)
    loads = loads_of(args, context)
    async with AsyncExitStack() as stack:
        benches = [
            await stack.enter_async_context(running_bench(name, args, context))
            for name in args.arrangement or ARRANGEMENTS
        ]
        for bench in benches:
            await bench.run(warm_up(loads))
        for load in loads:
            for bench in benches:
                yield await bench.run(load)
