"""Engine: plan a step, launch it, hand out the tokens of the step before."""

import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

from jaxserve.engine.events import TokenEvent
from jaxserve.engine.host.kv_transfer import KVTransfers
from jaxserve.engine.host.page_device import PageDevice
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.speculation import Costs
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.errors import EngineError, RequestIdInUseError
from jaxserve.request import Request


class Runner(Protocol):
    """The device half as the engine sees it."""

    def launch(self, plan: StepPlan) -> Any:
        """Start a step and return at once with a handle to its output."""
        ...

    def collect(self, plan: StepPlan, handle: Any) -> StepOutput:
        """Wait for a launched step's output."""
        ...

    def close(self) -> None:
        """Free the device memory; does nothing when called again."""
        ...


class Engine:
    """Drives a scheduler and a runner: one step is in flight while the host plans the next.

    Not thread-safe: one thread makes all calls. A step that an exception (or Ctrl-C) leaves half
    done ends the engine, since the scheduler's account and the device's pages may differ from then
    on: refusing to go on is better than a wrong token.

    Args:
        pages: Reader and writer of pages for other engines, usually the runner's; None if the
            engine exchanges no pages.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        pages: PageDevice | None = None,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.transfers = KVTransfers(scheduler, pages)
        self.waited = 0.0  # seconds spent waiting for outputs, since the engine was built
        self._clock = clock
        self._in_flight: tuple[StepPlan, Any] | None = None
        self._ending: list[TokenEvent] = []  # last events, to be handed out by the next step
        self._ended = ""  # why no step can run any more

    @property
    def usable(self) -> bool:
        """Return whether steps can still run."""
        return not self._ended

    def check_usable(self) -> None:
        """Raise EngineError if the engine was closed or one of its steps failed."""
        if self._ended:
            raise EngineError(self._ended)

    def submit(self, request: Request) -> int:
        """Queue a request and return its seed, which is drawn here if the client gave none.

        Raises RequestError if the request can never run.
        """
        self.check_usable()
        if any(event.request_id == request.id for event in self._ending):
            raise RequestIdInUseError(
                f"request id {request.id!r}: its abort was not handed out yet"
            )
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(64)
        self.scheduler.submit(request, seed, self._clock())
        return seed

    def abort(self, request_id: str) -> None:
        """End a request; its last events come with the next step."""
        self._ending += self.scheduler.abort(request_id, self._clock())

    def stop(self, request_id: str, index: int) -> TokenEvent | None:
        """End one choice whose text met a stop string and return its last event.

        None if the choice has ended already.
        """
        return self.scheduler.stop(request_id, index, self._clock())

    @property
    def speculates(self) -> bool:
        """Return whether tokens are drafted."""
        return self.scheduler.speculation is not None

    def set_step_costs(self, costs: Costs) -> None:
        """Draft from now on only as many tokens as pay off by these measured times of steps."""
        speculation = self.scheduler.speculation
        if speculation is None:
            raise EngineError("this engine drafts no tokens, so costs of steps are of no use to it")
        speculation.costs = costs

    def set_rows_of_several_decodes(self, rows: int) -> None:
        """Launch several decodes as one from now on only with at most so many rows in each lane."""
        self.scheduler.multi_step.compiled_rows = rows

    @property
    def has_work(self) -> bool:
        """Return whether another step would do something."""
        return self.usable and (
            self.scheduler.has_work or self._in_flight is not None or bool(self._ending)
        )

    def step(self) -> list[TokenEvent]:
        """Launch the next step and return the events of the one before."""
        self.check_usable()
        # Set first and cleared last, so that any exception on the way leaves the engine ended.
        self._ended = (
            "a step of the engine was interrupted or failed; close the engine and make a new one"
        )
        events = self._step()
        self._ended = ""
        return events

    def _step(self) -> list[TokenEvent]:
        now = self._clock()
        self._ending += self.scheduler.expire(now)
        plan = self.scheduler.plan(now)
        launched = (plan, self.runner.launch(plan)) if plan else None
        previous = self._in_flight
        self._in_flight = launched
        events = self._ending
        self._ending = []
        if previous:
            began = self._clock()
            output = self.runner.collect(*previous)
            now = self._clock()
            self.waited += now - began
            events += self.scheduler.commit(previous[0], output, now)
        self.transfers.advance()
        return events

    def close(self) -> None:
        """Free the runner's memory; requests that have not finished never will."""
        self._ended = "the engine is closed; make a new one"
        self._in_flight = None
        self.runner.close()
