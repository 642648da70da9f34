"""Events of the engine, handed on without holding up the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

from jaxserve.engine.engine_thread import ComputeTotals, StepReport
from jaxserve.engine.events import TokenEvent

EVENTS_AT_ONCE = 32  # events handled in one turn of the event loop, before other work gets its turn


class EventQueue:
    """Hands on the events of steps in order, a few in each turn of the event loop.

    A step of a large batch brings hundreds of events; in between, the writers and other tasks get
    their turn.

    Args:
        route: Function called with an event, and with the totals and the time of its step's report.
    """

    def __init__(self, route: Callable[[TokenEvent, ComputeTotals, float], None]):
        self._route = route
        self._waiting: deque[tuple[TokenEvent, ComputeTotals, float]] = deque()

    def add(self, report: StepReport, now: float) -> None:
        """Hand on some events of a report now, and the rest in later turns of the event loop."""
        was_idle = not self._waiting
        self._waiting.extend((event, report.totals, now) for event in report.events)
        if was_idle:  # else a later turn is scheduled already
            self._route_some()

    def _route_some(self) -> None:
        for _ in range(min(EVENTS_AT_ONCE, len(self._waiting))):
            self._route(*self._waiting.popleft())
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._route_some)
