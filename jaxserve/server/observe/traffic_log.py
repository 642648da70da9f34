"""A line about the load every ten seconds, while there is any."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from jaxserve.engine.engine_thread import Loads, StepReport
from jaxserve.errors import JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.incoming_request import IncomingRequest

PERIOD: Final = 10.0  # seconds
log = logging.getLogger("jaxserve.traffic")


class TrafficLog:
    """Writes a line ten seconds after the first step since the last line.

    A RequestObserver. `running 12 waiting 3 cache 41 % 1,930 tok/s hits 54 %`: choices with and
    without a row, and the share of pages in use, at the last step; tokens for clients per second,
    and the share of prompt tokens that the prefix cache had, over the ten seconds. Requests that
    were looked up count when they end; without any, the line has no hits.

    Args:
        later: Function that calls a function after seconds; None: that of the running event loop.
    """

    def __init__(self, later: Callable[[float, Callable[[], None]], object] | None = None):
        self._later = later
        self._scheduled = False
        self._loads = Loads()
        self._generated = 0
        self._looked_up = 0
        self._found = 0

    def refused(self, incoming: IncomingRequest, error: JaxserveError) -> None:
        pass

    def stepped(self, report: StepReport) -> None:
        self._loads = report.loads
        if not self._scheduled:
            self._scheduled = True
            later = self._later or asyncio.get_running_loop().call_later
            later(PERIOD, self._write)

    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None:
        self._generated += tokens

    def ended(self, answer: Answer, error: JaxserveError | None) -> None:
        if answer.times and answer.times.admitted:
            self._looked_up += answer.prompt_tokens
            self._found += answer.times.cached

    def _write(self) -> None:
        loads = self._loads
        used = loads.pages_used / max(loads.pages_total, 1)
        hits = f" hits {self._found / self._looked_up:.0%}" if self._looked_up else ""
        text = (
            f"running {loads.running} waiting {loads.waiting} cache {used:.0%} "
            f"{self._generated / PERIOD:,.0f} tok/s{hits}"
        )
        log.info(text.replace("%", " %"))
        self._generated = 0
        self._looked_up = 0
        self._found = 0
        self._scheduled = False
