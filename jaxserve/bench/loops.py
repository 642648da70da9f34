"""Open and closed loops, the two ways of sending requests.

Open loop: every request is sent at its time, whatever is still running. Closed loop: a number of
requests is kept in flight, and the next one is sent when one has ended, or when a server that
refused it wants to be asked again. A closed loop slows down together with the server; so it hides
how long users of an overloaded server wait, but shows the most that the server can do.
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

# Bounds on how late requests are sent: share of the gap between two, and ms. Beyond them the load
# generator was measured, not the server.
LATE_SHARE = 0.1
LATE_MS = 50.0
LEAD = 0.05  # seconds from the last preparation to the first request
Ready = tuple[Arrival, Any]  # an arrival, and the request that the caller made for it


@dataclass
class Loop:
    """Sender of a load, with the outcomes of its requests."""

    caller: Caller
    prompts: Prompts
    timeout: float  # seconds of one request
    may_end_early: bool = False  # an answer may have fewer tokens than asked for
    choices: int = 1  # answers that the caller asks for with each request
    deadlines: Sequence[float | None] = (None,)  # seconds that requests give the server, in turn
    # Called whenever a request begins or ends.
    changed: Callable[["Loop"], None] = lambda loop: None
    # Outcomes of the requests that were sent so far, in their order.
    outcomes: list[Outcome] = field(default_factory=list)
    in_flight: int = 0  # requests that have not ended
    peak_in_flight: int = 0
    # Salt of cached pages, another one for each loop: pages of an earlier run are of no use.
    salt: str = field(default_factory=lambda: secrets.token_hex(8))

    async def run(self, load: Load) -> None:
        """Send a load and wait until all requests have ended.

        Being cancelled cancels all requests in flight.
        """
        await (self.closed(load) if load.concurrency else self.open(load.arrivals))

    async def open(self, arrivals: Sequence[Arrival]) -> None:
        """Send every request at its time."""
        ready = await self._prepared(arrivals)
        began = time.monotonic() + LEAD
        async with asyncio.TaskGroup() as group:
            for arrival, request in ready:
                due = began + arrival.due
                await asyncio.sleep(due - time.monotonic())
                group.create_task(self._one(arrival, request, due))

    async def closed(self, load: Load) -> None:
        """Keep a number of requests in flight; their times do not matter."""
        if load.endless:
            todo = self._endless(load.arrivals)
        else:
            todo = iter(await self._prepared(load.arrivals))
        end = time.monotonic() + (load.seconds or float("inf"))

        async def worker() -> None:
            while time.monotonic() < end and (following := next(todo, None)):
                outcome = await self._one(*following, due=time.monotonic())
                # A client that comes back at once takes the server's time, and its own chance.
                await asyncio.sleep(min(outcome.retry_after or 0.0, end - time.monotonic()))

        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency or 1):
                group.create_task(worker())

    def _endless(self, arrivals: Sequence[Arrival]) -> Iterator[Ready]:
        """Yield the arrivals over and over, with other prompts each time."""
        for number, arrival in enumerate(cycle(arrivals)):
            yield arrival, self._prepare(number, arrival)

    async def _prepared(self, arrivals: Sequence[Arrival]) -> list[Ready]:
        ready = []
        for number, arrival in enumerate(arrivals):
            ready.append((arrival, self._prepare(number, arrival)))
            await asyncio.sleep(0)  # lets Ctrl-C through: a long trace takes a while
        return ready

    def _prepare(self, number: int, arrival: Arrival) -> Any:
        prompt = self.prompts.of(number, arrival)
        return self.caller.prepare(prompt, arrival.output_tokens, self.salt)

    async def _one(self, arrival: Arrival, request: Any, due: float) -> Outcome:
        outcome = Outcome(
            due,
            arrival.prompt_tokens,
            arrival.output_tokens * self.choices,
            self.may_end_early,
            self.deadlines[len(self.outcomes) % len(self.deadlines)],
        )
        self.outcomes.append(outcome)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self.changed(self)
        try:
            await call(self.caller, request, outcome, self.timeout)
        finally:
            self.in_flight -= 1
            self.changed(self)
        return outcome


def lateness(lag: Spread | None, arrivals: Sequence[Arrival]) -> str:
    """Return a warning if requests were sent so late that the figures mean nothing, or ""."""
    gap = 1e3 * mean_gap(arrivals)
    if lag is None or not (lag.p99 > LATE_MS or lag.p99 > LATE_SHARE * gap > 0):
        return ""
    return (
        f"the generator was late: p99 {lag.p99:.1f} ms, with {gap:.1f} ms between requests on "
        f"average; so it was measured, not the server (give it a core of its own, or a lower rate)"
    )
