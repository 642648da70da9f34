"""An open loop: every request is sent at its time, whatever is still running.

A closed loop, which sends the next request when one is done, slows down together with the server and so hides how long
people wait for an overloaded one.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.arrivals import Arrival, Prompts, mean_gap
from benchmarks.latency import Outcome, Spread
from benchmarks.load_clients import Caller, call

LATE_SHARE, LATE_MS = 0.1, 50.0  # a generator that is later than that was measured itself
LEAD = 0.05  # seconds from the last preparation to the first request


@dataclass
class OpenLoop:
    """Sends arrivals and holds what became of them. changed: told whenever a request begins or ends.

    outcomes: of the requests that were sent so far, in their order; in_flight: those of them that have not ended.
    """

    caller: Caller
    prompts: Prompts
    changed: Callable[["OpenLoop"], None] = lambda loop: None
    outcomes: list[Outcome] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0

    async def run(self, arrivals: Sequence[Arrival]) -> None:
        """Until all have ended. Cancelled, it cancels what is in flight."""
        salt = secrets.token_hex(8)  # what an earlier run left in the prefix cache helps nobody
        ready = []
        for number, arrival in enumerate(arrivals):
            ready.append(self.caller.prepare(self.prompts.of(number, arrival), arrival.output_tokens, salt))
            await asyncio.sleep(0)  # so that it can be interrupted: a long trace takes a while
        began = time.monotonic() + LEAD
        async with asyncio.TaskGroup() as group:
            for arrival, request in zip(arrivals, ready, strict=True):
                due = began + arrival.due
                await asyncio.sleep(due - time.monotonic())
                group.create_task(self._one(request, Outcome(due, arrival.prompt_tokens, arrival.output_tokens)))

    async def _one(self, request: Any, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self.changed(self)
        try:
            await call(self.caller, request, outcome)
        finally:
            self.in_flight -= 1
            self.changed(self)


def lateness(lag: Spread | None, arrivals: Sequence[Arrival]) -> str:
    """A warning, when requests were sent so late that the generator was measured and not the server; or nothing."""
    gap = 1e3 * mean_gap(arrivals)
    if lag is None or not (lag.p99 > LATE_MS or lag.p99 > LATE_SHARE * gap > 0):
        return ""
    return (
        f"the generator was late: p99 {lag.p99:.1f} ms, with {gap:.1f} ms between requests on average; so it was "
        f"measured, not the server (give it a core of its own, or a lower rate)"
    )
