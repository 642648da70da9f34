"""GET /live: the engine as it is, once a second, as server-sent events; for the page, and for
whoever likes JSON.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import QueueFullError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.errors import answering
from jaxserve.server.http.json import dumps
from jaxserve.server.http.stream import EventStream
from jaxserve.server.observe.metrics import PREFIX
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.serving_state import ServingState

EVERY = 1.0  # seconds
NOTICE = 0.2  # seconds until a new phase is told


class Live:
    """A message is made once for all who watch; while nobody does, nothing is made and nothing
    waits.

    families: of the metrics, so that /metrics says the same.
    """

    def __init__(
        self, readiness: Readiness, limits: Limits, families: Callable[[], Iterable[Metric]]
    ):
        self._readiness, self._limits, self._families = readiness, limits, families
        self.watchers = 0
        self._made: tuple[int, Phase] | None = None  # when, and in which phase, the message was
        self._message = b""

    @answering
    async def live(self, request: Request) -> Response:
        """Until the client goes away, or the server begins to end."""
        if request.method == "HEAD":
            return Response(media_type=EventStream.media_type)
        limit = self._limits.max_watchers
        if self.watchers >= limit:
            raise QueueFullError(
                f"{self.watchers} watch already, as many as --max-watchers {limit} allows", EVERY
            )
        async with AsyncExitStack() as stack:
            stack.enter_context(self._counted())
            return EventStream(
                self._events(), stack.pop_all(), self._limits.slow_client_seconds, {}
            )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.watchers += 1
        try:
            yield
        finally:
            self.watchers -= 1

    async def _events(self) -> AsyncGenerator[bytes]:
        beat = 0
        while True:
            beat = max(beat + 1, int(time.monotonic() / EVERY))  # one who reads slowly misses some
            phase = self._readiness.phase
            yield self._at(beat, phase)
            if phase not in (Phase.LOADING, Phase.READY):
                return
            await self._pause((beat + 1) * EVERY, phase)

    async def _pause(self, until: float, phase: Phase) -> None:
        while self._readiness.phase is phase and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, NOTICE))

    def _at(self, beat: int, phase: Phase) -> bytes:
        if self._made != (beat, phase):
            self._made = beat, phase
            self._message = b"data: " + dumps(self._told(phase)) + b"\n\n"
        return self._message

    def _told(self, phase: Phase) -> dict[str, Any]:
        metrics = {family.name.removeprefix(PREFIX): _plain(family) for family in self._families()}
        told = {"phase": str(phase), "at": round(time.monotonic(), 3), "metrics": metrics}
        return told | (_of(self._readiness.state) if self._readiness.state else {})


def _of(served: ServingState) -> dict[str, Any]:
    model, engine, loads = served.model, served.engine, served.service.loads
    return {
        "ready_seconds": round(time.monotonic() - served.ready_since, 3),
        "model": {
            "name": model.name,
            "architecture": model.architecture,
            "parameters": model.parameters,
            "weights": model.weights,
            "max_context": model.max_context,
        },
        "engine": {
            "device": engine.device_kind,
            "mesh": engine.mesh,
            "rows": engine.max_batch * engine.lanes,
            "step_tokens": engine.step_tokens,
            "page_size": engine.page_size,
        },
        "pages": {"used": loads.pages_used, "total": loads.pages_total},
        "steps": [asdict(use) for use in served.steps()],
    }


def _plain(family: Metric) -> Any:
    """A number, or numbers by label; of a histogram the counts up to each bound, and the sum."""
    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    if family.type == "histogram":
        counts = {sample.labels["le"]: sample.value for sample in samples if "le" in sample.labels}
        return {
            "le": counts,
            "sum": next(sample.value for sample in samples if sample.name.endswith("_sum")),
        }
    if len(samples) == 1 and not samples[0].labels:
        return samples[0].value
    return {",".join(sample.labels.values()): sample.value for sample in samples}
