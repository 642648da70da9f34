"""The calls of an AsyncLLM: from event loops to the engine's thread, and the events back."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from jaxserve.delta_streams import Steps
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_thread import StepReport
from jaxserve.engine.events import TokenEvent
from jaxserve.errors import EngineError
from jaxserve.prompts import Prepared

CLOSED = "this AsyncLLM is closed"


class AsyncCall:
    """A call of a coroutine: its prompts, and the events that have come for them.

    Belongs to the event loop that runs when it is made; its methods are for that loop.
    """

    def __init__(self, prompts: Sequence[Prepared]):
        self.prompts = prompts
        self.loop = asyncio.get_running_loop()
        self._events: deque[TokenEvent] = deque()
        self._error: EngineError | None = None
        self._changed = asyncio.Event()

    def add(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._changed.set()

    def fail(self, error: EngineError) -> None:
        """End the call with an error, behind the events that have come."""
        self._error = error
        self._changed.set()

    async def next_event(self) -> TokenEvent:
        """Wait for the next event of any of the prompts; raises the error that ended the call."""
        while not self._events:
            if self._error:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()


@dataclass
class _Request:
    """A request that has not ended."""

    call: AsyncCall
    choices: int  # that have not ended


class AsyncCalls:
    """All calls that run.

    Its methods are for the engine's thread, but for those that say otherwise.

    Args:
        steps: What compiles the steps.
    """

    def __init__(self, engine: Engine, steps: Steps):
        self._engine = engine
        self._steps = steps
        self._new: deque[tuple[AsyncCall, Future[list[int]]]] = deque()  # not yet submitted
        self._requests: dict[str, _Request] = {}  # by id
        self._ended = ""  # why no call can run any more
        self._cause: BaseException | None = None  # error that ended the engine

    def check_usable(self) -> None:
        """Raise EngineError if no call can run any more; for any thread."""
        if self._ended:
            raise self.new_error()

    def new_error(self) -> EngineError:
        """Return a new error that says why no call can run any more; for any thread."""
        error = EngineError(self._ended or CLOSED)
        error.__cause__ = self._cause
        return error

    def add(self, call: AsyncCall) -> "Future[list[int]]":
        """Put a call into line for `submit`, and return its seeds to come; for any thread."""
        seeds: Future[list[int]] = Future()
        self._new.append((call, seeds))
        if self._ended:  # and nobody submits any more
            self._refuse_new()
        return seeds

    def submit(self) -> None:
        """Submit the prompts of all calls that are in line.

        The fewest steps that they need are compiled first; those that run already wait meanwhile.
        """
        calls = self._take_new()
        # Once for all of them: what to compile depends on everything that runs together.
        together = [prompt for call, _ in calls for prompt in call.prompts]
        failed = self._why_not(together)
        for call, seeds in calls:
            try:
                if failed:  # one of them is to blame
                    self._begin(call.prompts)
                seeds.set_result(self._submit(call))
            except Exception as error:
                seeds.set_exception(error)

    def _take_new(self) -> "list[tuple[AsyncCall, Future[list[int]]]]":
        """Take the calls out of the line that were not cancelled; for any thread."""
        calls = []
        with suppress(IndexError):  # the line is empty
            while True:
                call, seeds = self._new.popleft()
                if seeds.set_running_or_notify_cancel():
                    calls.append((call, seeds))
        return calls

    def _refuse_new(self) -> None:
        for _, seeds in self._take_new():
            seeds.set_exception(self.new_error())

    def _why_not(self, prompts: Sequence[Prepared]) -> Exception | None:
        """Compile for prompts, and return the error if that fails."""
        try:
            self._begin(prompts)
        except Exception as error:
            return error
        return None

    def _begin(self, prompts: Sequence[Prepared]) -> None:
        running = {request.call: None for request in self._requests.values()}
        self._steps.begin([*(p for call in running for p in call.prompts), *prompts])

    def _submit(self, call: AsyncCall) -> list[int]:
        self.check_usable()
        seeds = []
        for prompt in call.prompts:
            seeds.append(self._engine.submit(prompt.request))
            self._requests[prompt.request.id] = _Request(call, prompt.request.params.n)
        return seeds

    def leave(self, call: AsyncCall) -> None:
        """Abort what is left of a call that has ended."""
        for prompt in call.prompts:
            if self._requests.pop(prompt.request.id, None):
                self._engine.abort(prompt.request.id)
        if not self._requests:
            self._steps.rest()

    def deliver(self, report: StepReport) -> None:
        """Hand the events of a step over to their calls."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[AsyncCall, TokenEvent]]] = {}
        for event in report.events:
            if request := self._requests.get(event.request_id):  # else it has been left
                by_loop.setdefault(request.call.loop, []).append((request.call, event))
                self._note_end(request, event)
        for loop, arrivals in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_over, arrivals)
            except RuntimeError:  # the loop is closed, and nobody waits for these calls
                for call in {call: None for call, _ in arrivals}:
                    self.leave(call)

    def _note_end(self, request: _Request, event: TokenEvent) -> None:
        request.choices -= event.finish is not None
        if request.choices == 0:
            del self._requests[event.request_id]

    def fail_after(self, error: BaseException) -> None:
        """End every call with the error that has ended the engine."""
        self._cause = error
        self.fail(f"the engine has failed: {error} (close this AsyncLLM and make a new one)")

    def fail(self, why: str) -> None:
        """End every call that runs, and all that come, with an error that says why.

        For any thread once that of the engine has ended.
        """
        self._ended = self._ended or why
        for call in {request.call for request in self._requests.values()}:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits for the call
                call.loop.call_soon_threadsafe(call.fail, self.new_error())
        self._requests.clear()
        self._refuse_new()


def _hand_over(arrivals: list[tuple[AsyncCall, TokenEvent]]) -> None:
    for call, event in arrivals:
        call.add(event)
