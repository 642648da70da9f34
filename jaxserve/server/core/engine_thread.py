"""The one thread that touches the engine. Others leave it jobs; it hands over the news of each step
at once.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import Finish, FinishReason, TokenEvent
from jaxserve.errors import JaxserveError, RestartingError
from jaxserve.request import Request


@dataclass(frozen=True, slots=True)
class ComputeTotals:
    """What the device has computed so far. bucket: the compiled step whose output was read last."""

    live_tokens: int = 0
    computed_tokens: int = 0
    bucket: str = ""


@dataclass(frozen=True, slots=True)
class Loads:
    """Choices with a row and without one; pages of all groups and lanes. Of the rest: so far.

    verifications: of a choice's drafts. drafted, accepted: their tokens, and those that were right.
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    preemptions: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step brought. seconds: of the step; host_seconds: those not spent waiting for the
    device.
    """

    events: list[TokenEvent]
    loads: Loads
    totals: ComputeTotals
    seconds: float
    host_seconds: float


class EngineThread:
    """Runs an engine. `submit`, `abort`, `stop` and `call` may be called from any thread and return
    at once.

    deliver: called on this thread with the news of each step; it must not block. failed: called
    there with the exception that ended the engine; nothing is delivered after it. tally: asked
    after each step.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[StepReport], None],
        failed: Callable[[BaseException], None],
        totals: Callable[[], ComputeTotals] = ComputeTotals,
    ):
        self._engine = engine
        self._deliver, self._failed, self._totals = deliver, failed, totals
        self._jobs: deque[Callable[[], None]] = deque()
        self._immediate: list[TokenEvent] = []  # events that no step brings
        self._told = Loads()
        self._wake = threading.Condition()
        self._closing = self._ended = False
        self._calls: set[Future[Any]] = set()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request. One that the engine refuses gets its error as the finish of its first
        choice.
        """
        self._add(lambda: self._submit(request))

    def abort(self, request_id: str) -> None:
        self._add(lambda: self._engine.abort(request_id))

    def stop(self, request_id: str, index: int) -> None:
        """End one choice whose text met a stop string; its last event comes with the next
        step's."""
        self._add(lambda: self._stop(request_id, index))

    def call[T](self, function: Callable[[Engine], T]) -> "Future[T]":
        """Run a function between two steps."""
        future: Future[T] = Future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._add(lambda: _fulfil(future, lambda: function(self._engine)))
        if self._ended:
            self._give_up()
        return future

    @property
    def stuck_for(self) -> float:
        """Seconds since the step began that has not ended yet; 0 between steps."""
        since = self._busy_since
        return time.monotonic() - since if since else 0.0

    def close(self, timeout: float = 10.0) -> bool:
        """End the thread after its step; whether it ended in time. The engine stays as it is."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- on the thread

    def _add(self, job: Callable[[], None]) -> None:
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._busy_since = time.monotonic()  # a job may wait for the device as well
                while self._jobs:
                    self._jobs.popleft()()
                self._step()
        except BaseException as error:
            self._failed(error)
        finally:
            self._ended = True
            self._give_up()

    def _give_up(self) -> None:
        """Whoever waits for a call is told that it will never be made."""
        for future in list(self._calls):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(RestartingError("the engine has ended; the server restarts"))

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._closing or self._jobs or self._immediate or self._engine.has_work):
                self._wake.wait()
            return not self._closing

    def _step(self) -> None:
        events, self._immediate = self._immediate, []
        waited, began = self._engine.waited, time.monotonic()
        self._busy_since = began
        if self._engine.has_work:
            events += self._engine.step()
        self._busy_since = None
        seconds, loads = time.monotonic() - began, self._loads()
        if events or loads != self._told:
            self._told = loads
            host_seconds = seconds - (self._engine.waited - waited)
            self._deliver(StepReport(events, loads, self._totals(), seconds, host_seconds))

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except JaxserveError as error:
            self._immediate.append(
                TokenEvent(request.id, 0, [], finish=Finish(FinishReason.ERROR, error=error))
            )

    def _stop(self, request_id: str, index: int) -> None:
        if event := self._engine.stop(request_id, index):
            self._immediate.append(event)

    def _loads(self) -> Loads:
        scheduler, speculation = self._engine.scheduler, self._engine.scheduler.speculation
        pools = [cache.pool for lane in scheduler.lanes for cache in lane.caches]
        total = sum(pool.num_pages for pool in pools)
        return Loads(
            running=sum(len(lane.running) for lane in scheduler.lanes),
            waiting=len(scheduler.waiting),
            pages_used=total - sum(pool.available for pool in pools),
            pages_total=total,
            preemptions=scheduler.preemptions,
            verifications=speculation.verifications if speculation else 0,
            drafted=speculation.drafted if speculation else 0,
            accepted=speculation.accepted if speculation else 0,
        )


def _fulfil(future: "Future[Any]", function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # whoever asked went away
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
