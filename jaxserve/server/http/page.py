"""Serve the page for people: static files at / and /page/..., and the live figures at /live.

The files hold no secret: the page loads without a token, asks for one, and sends it with its
requests as any other client does.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from jaxserve.errors import QueueFullError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.errors import errors_to_responses
from jaxserve.server.http.replies import frame
from jaxserve.server.http.streams import EventStream
from jaxserve.server.observe.metrics import PREFIX
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.serving_state import ServingState

FOLDER = Path(__file__).parent / "page_files"
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Browsers keep a file but ask for it again by its ETag: the server may have been updated.
    "cache-control": "no-cache",
}
PERIOD = 1.0  # seconds between two messages of /live
POLL = 0.2  # seconds until a new phase is noticed


def is_page(path: str) -> bool:
    """Return whether a path belongs to the page's files, which need no token."""
    return path == "/" or path.startswith("/page/")


class Page:
    """Endpoints of the page's files."""

    def __init__(self) -> None:
        self._files = StaticFiles(directory=FOLDER)

    async def index(self, request: Request) -> Response:
        return await self._send("index.html", request)

    async def file(self, request: Request) -> Response:
        return await self._send(request.path_params["path"], request)

    async def _send(self, path: str, request: Request) -> Response:
        response = await self._files.get_response(path, request.scope)
        response.headers.update(HEADERS)
        return response


class Live:
    """Endpoint of the engine's state, once a second, as server-sent events.

    All watchers share each message, which the first one makes; without watchers no message is made
    and no timer runs. `families` returns the metrics, so that /live and /metrics agree.
    """

    def __init__(
        self, readiness: Readiness, limits: Limits, families: Callable[[], Iterable[Metric]]
    ):
        self._readiness = readiness
        self._limits = limits
        self._families = families
        self.watchers = 0
        self._message = b""
        self._message_of: tuple[int, Phase] | None = None  # period and phase of the message

    @errors_to_responses
    async def live(self, request: Request) -> Response:
        """Stream messages until the client goes away or the server begins to end."""
        if request.method == "HEAD":
            return Response(media_type=EventStream.media_type)
        limit = self._limits.max_watchers
        if self.watchers >= limit:
            raise QueueFullError(
                f"/live has {self.watchers} watchers; the limit is {limit} "
                f"(--max-watchers {limit})",
                PERIOD,
            )
        async with AsyncExitStack() as stack:
            stack.enter_context(self._counted())
            return EventStream(self._events(), stack.pop_all(), {})

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.watchers += 1
        try:
            yield
        finally:
            self.watchers -= 1

    async def _events(self) -> AsyncGenerator[bytes]:
        # Periods are numbered by the clock, the same for all watchers: a watcher that reads slowly
        # skips some, and each waits for the next one's beginning.
        period = 0
        while True:
            period = max(period + 1, int(time.monotonic() / PERIOD))
            phase = self._readiness.phase
            yield self._message_for(period, phase)
            if phase not in (Phase.LOADING, Phase.READY):
                return
            await self._pause((period + 1) * PERIOD, phase)

    async def _pause(self, until: float, phase: Phase) -> None:
        """Wait until the time has come, or until the phase has changed."""
        while self._readiness.phase is phase and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, POLL))

    def _message_for(self, period: int, phase: Phase) -> bytes:
        if self._message_of != (period, phase):
            self._message_of = (period, phase)
            self._message = frame(self._state(phase))
        return self._message

    def _state(self, phase: Phase) -> dict[str, Any]:
        metrics = {family.name.removeprefix(PREFIX): _plain(family) for family in self._families()}
        state = {"phase": str(phase), "at": round(time.monotonic(), 3), "metrics": metrics}
        if self._readiness.state:
            state |= _served_state(self._readiness.state)
        return state


def _served_state(served: ServingState) -> dict[str, Any]:
    model = served.model
    engine = served.engine
    loads = served.service.loads
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
    """Return a metric as a number, or as numbers by label.

    A histogram becomes its cumulative counts by upper bound, and its sum.
    """
    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    if family.type == "histogram":
        counts = {sample.labels["le"]: sample.value for sample in samples if "le" in sample.labels}
        total = next(sample.value for sample in samples if sample.name.endswith("_sum"))
        return {"le": counts, "sum": total}
    if len(samples) == 1 and not samples[0].labels:
        return samples[0].value
    return {",".join(sample.labels.values()): sample.value for sample in samples}
