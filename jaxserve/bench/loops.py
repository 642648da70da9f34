"""The two ways of asking.

Open loop: every request is sent at its time, whatever is still running. Closed loop: so many are
kept running, and the next one is sent when one has ended; it slows down together with the server,
and so hides how long people wait for an overloaded one, but shows what the server can do at most.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from jaxserve.bench.arrivals import Arrival, mean_gap
from jaxserve.bench.caller import Caller, call
from jaxserve.bench.latency import Outcome, Spread
from jaxserve.bench.load import Load
from jaxserve.bench.prompts import Prompts

LATE_SHARE, LATE_MS = 0.1, 50.0  # a generator that is later than that was measured itself
LEAD = 0.05  # seconds from the last preparation to the first request
Ready = tuple[Arrival, Any]  # and the request that the caller made for it


@dataclass
class Loop:
    """Sends requests and holds what became of them.

    timeout: seconds of one request. may_end_early: an answer may have fewer tokens than asked for.
    changed: told whenever a request begins or ends. outcomes: of the requests that were sent so
    far, in their order; in_flight: those of them that have not ended.
    """

    caller: Caller
    prompts: Prompts
    timeout: float
    may_end_early: bool = False
    changed: Callable[["Loop"], None] = lambda loop: None
    outcomes: list[Outcome] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0
    salt: str = field(
        default_factory=lambda: secrets.token_hex(8)
    )  # what an earlier run left cached helps nobody

    async def run(self, load: Load) -> None:
        """Until all have ended. Cancelled, it cancels what is in flight."""
        await (self.closed(load) if load.concurrency else self.open(load.arrivals))

    async def open(self, arrivals: Sequence[Arrival]) -> None:
        """As above."""
        ready = await self._prepared(arrivals)
        began = time.monotonic() + LEAD
        async with asyncio.TaskGroup() as group:
            for arrival, request in ready:
                due = began + arrival.due
                await asyncio.sleep(due - time.monotonic())
                group.create_task(self._one(arrival, request, due))

    async def closed(self, load: Load) -> None:
        """As above; when requests are due does not matter."""
        todo = (
            self._endless(load.arrivals)
            if load.endless
            else iter(await self._prepared(load.arrivals))
        )
        end = time.monotonic() + (load.seconds or float("inf"))

        async def worker() -> None:
            while time.monotonic() < end and (following := next(todo, None)):
                await self._one(*following, due=time.monotonic())

        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency or 1):
                group.create_task(worker())

    def _endless(self, arrivals: Sequence[Arrival]) -> Iterator[Ready]:
        """Again and again, with other prompts each time; prepared when they are asked for."""
        return (
            (arrival, self._prepare(number, arrival))
            for number, arrival in enumerate(cycle(arrivals))
        )

    async def _prepared(self, arrivals: Sequence[Arrival]) -> list[Ready]:
        ready = []
        for number, arrival in enumerate(arrivals):
            ready.append((arrival, self._prepare(number, arrival)))
            await asyncio.sleep(0)  # so that it can be interrupted: a long trace takes a while
        return ready

    def _prepare(self, number: int, arrival: Arrival) -> Any:
        return self.caller.prepare(
            self.prompts.of(number, arrival), arrival.output_tokens, self.salt
        )

    async def _one(self, arrival: Arrival, request: Any, due: float) -> None:
        outcome = Outcome(due, arrival.prompt_tokens, arrival.output_tokens, self.may_end_early)
        self.outcomes.append(outcome)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self.changed(self)
        try:
            await call(self.caller, request, outcome, self.timeout)
        finally:
            self.in_flight -= 1
            self.changed(self)


def lateness(lag: Spread | None, arrivals: Sequence[Arrival]) -> str:
    """A warning, when requests were sent so late that the generator was measured and not the
    server; or nothing.
    """
    gap = 1e3 * mean_gap(arrivals)
    if lag is None or not (lag.p99 > LATE_MS or lag.p99 > LATE_SHARE * gap > 0):
        return ""
    return (
        f"the generator was late: p99 {lag.p99:.1f} ms, with {gap:.1f} ms between requests on "
        f"average; so it was "
        f"measured, not the server (give it a core of its own, or a lower rate)"
    )
