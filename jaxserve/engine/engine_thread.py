"""The one thread that touches the engine.

Other threads leave jobs in its queue. After each step it hands the step's events over.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from jaxserve.engine.engine import Engine
from jaxserve.engine.events import Finish, FinishReason, TokenEvent
from jaxserve.errors import EngineError, JaxserveError
from jaxserve.request import Request


@dataclass(frozen=True, slots=True)
class ComputeTotals:
    """Tokens that the device has computed since the engine was built."""

    live_tokens: int = 0  # those that belong to requests
    computed_tokens: int = 0  # padding included
    bucket: str = ""  # compiled step whose output was read last


@dataclass(frozen=True, slots=True)
class Loads:
    """Occupation of the engine, and counters since it was built."""

    running: int = 0  # choices with a row
    waiting: int = 0  # choices without a row
    pages_used: int = 0  # over all page groups and lanes
    pages_total: int = 0  # over all page groups and lanes
    preemptions: int = 0  # choices that lost their row to others
    verifications: int = 0  # a choice's drafts of one step count as one
    drafted: int = 0  # tokens
    accepted: int = 0  # tokens, of those that were drafted


@dataclass(frozen=True, slots=True)
class StepReport:
    """Events and figures of one step."""

    events: list[TokenEvent]
    loads: Loads
    totals: ComputeTotals
    seconds: float  # duration of the step
    host_seconds: float  # the part of `seconds` not spent waiting for the device
    collected: float  # time at which the step's output was there, on the clock of the thread
    # Cached tokens of the prompts of requests that have got a row since, by request id.
    begun: Mapping[str, int] = field(default_factory=dict)


class EngineThread:
    """Runs an engine on a thread of its own.

    `submit`, `abort`, `stop`, `call` and `do` may be called from any thread and return at once.
    Once the thread has ended they do nothing, but for the error of `call`.

    Args:
        deliver: Function called on this thread with the report of each step; it must not block.
        failed: Function called on this thread with the exception that ended the engine; no report
            follows.
        totals: Function called after each step.
        clock: Function that returns the time in seconds.
        before_step: Function called before each step.
        ended: Function that makes the error of each `call` that the thread makes no more.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[StepReport], None],
        failed: Callable[[BaseException], None],
        totals: Callable[[], ComputeTotals] = ComputeTotals,
        clock: Callable[[], float] = time.monotonic,
        before_step: Callable[[], object] = lambda: None,
        ended: Callable[[], JaxserveError] = lambda: EngineError("the engine has ended"),
    ):
        self._engine = engine
        self._deliver = deliver
        self._failed = failed
        self._new_error = ended
        self._before_step = before_step
        self._totals = totals
        self._clock = clock
        self._jobs: deque[Callable[[], None]] = deque()
        self._immediate: list[TokenEvent] = []  # events that no step brings
        self._reported = self.loads()  # of the last report
        self._wake = threading.Condition()
        self._closing = False
        self._ended = False
        self._calls: set[Future[Any]] = set()
        self._busy_since: float | None = None  # monotonic; None between steps
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request; an engine that refuses it ends its first choice with the error."""
        self._add(lambda: self._submit(request))

    def abort(self, request_id: str) -> None:
        """End a request; its last events come with the next step."""
        self._add(lambda: self._engine.abort(request_id))

    def stop(self, request_id: str, index: int) -> None:
        """End one choice whose text met a stop string; its last event comes with the next step."""
        self._add(lambda: self._stop(request_id, index))

    def call[T](self, function: Callable[[Engine], T]) -> "Future[T]":
        """Run a function between two steps."""
        future: Future[T] = Future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._add(lambda: _fulfil(future, lambda: function(self._engine)))
        # The thread may have ended, and emptied `_calls`, before this future was added.
        if self._ended:
            self._fail_calls()
        return future

    def do(self, job: Callable[[Engine], None]) -> None:
        """Do a job between two steps; its exception ends the engine, as that of a step does."""
        self._add(lambda: job(self._engine))

    def loads(self) -> Loads:
        """Return the occupation of the engine; on this thread, or before it starts."""
        scheduler = self._engine.scheduler
        speculation = scheduler.speculation
        pools = [pool for lane in scheduler.lanes for pool in lane.page_pools]
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

    @property
    def stuck_for(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        since = self._busy_since  # read once: the engine's thread may reset it meanwhile
        return time.monotonic() - since if since else 0.0

    def close(self, timeout: float | None = 10.0) -> bool:
        """End the thread after its current step; return whether it ended within `timeout` seconds.

        None waits as long as it takes; called on the thread itself it does not wait. The engine is
        not closed.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- on the thread

    def _add(self, job: Callable[[], None]) -> None:
        with self._wake:
            if self._ended:
                return
            self._jobs.append(job)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._busy_since = time.monotonic()  # a job may wait for the device as well
                for _ in range(len(self._jobs)):  # a job that one of them adds follows a step
                    self._jobs.popleft()()
                self._step()
        except BaseException as error:
            self._failed(error)
        finally:
            with self._wake:
                self._ended = True
                # They would keep alive what they refer to, for as long as this object is.
                self._jobs.clear()
            self._fail_calls()

    def _fail_calls(self) -> None:
        """Fail the calls that will never be made."""
        for future in list(self._calls):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(self._new_error())

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._closing or self._jobs or self._immediate or self._engine.has_work):
                self._wake.wait()
            return not self._closing

    def _step(self) -> None:
        events = self._immediate
        self._immediate = []
        begun: dict[str, int] = {}
        waited_before = self._engine.waited
        began = time.monotonic()
        self._busy_since = began
        if self._engine.has_work:
            self._before_step()
            events += self._engine.step()
            admitted = self._engine.scheduler.admitted
            begun = {seq.request.id: seq.times.cached for seq in admitted if seq.index == 0}
        self._busy_since = None
        seconds = time.monotonic() - began
        loads = self.loads()
        if events or begun or loads != self._reported:
            self._reported = loads
            host_seconds = seconds - (self._engine.waited - waited_before)
            now = self._clock()
            self._deliver(
                StepReport(events, loads, self._totals(), seconds, host_seconds, now, begun)
            )

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except JaxserveError as error:
            finish = Finish(FinishReason.ERROR, error=error)
            self._immediate.append(TokenEvent(request.id, 0, [], finish=finish))

    def _stop(self, request_id: str, index: int) -> None:
        if event := self._engine.stop(request_id, index):  # None: the choice has ended meanwhile
            self._immediate.append(event)


def _fulfil(future: "Future[Any]", function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # cancelled by the caller
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
