"""Iterators over the text of running prompts, several of which share one engine."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.call_guard import CallGuard
from jaxserve.completion import Delta
from jaxserve.engine.device.background import compiles_here
from jaxserve.engine.engine import Engine
from jaxserve.engine.events import TokenEvent
from jaxserve.errors import EngineError
from jaxserve.open_choices import OpenPrompts
from jaxserve.progress import Bar
from jaxserve.prompts import Prepared
from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Live:
    """A running request and the inbox, of one `run` iterator, that its events go to."""

    prompt: Prepared
    inbox: deque[TokenEvent]


class Steps(Protocol):
    """Compiler of an LLM's steps, as far as running prompts needs it; see llm_warm_up.WarmUp."""

    def begin(self, prompts: Sequence[Prepared]) -> None:
        """Compile the fewest steps that prompts can run with, and begin with the others."""
        ...

    def install(self) -> object:
        """Put the steps into use that are compiled since; between two steps."""
        ...

    def rest(self) -> None:
        """Begin no further compile, as no prompt runs any more."""
        ...


class DeltaStreams:
    """Runs prepared prompts on an engine for any number of open iterators.

    Nothing runs in the background: asking any iterator for its next delta steps the engine, and the
    events of other iterators' requests go to their inboxes meanwhile. Each iterator is for one
    thread. Several threads take turns of one step: who waits for its next delta keeps nobody else
    from seeing a stop string, or from leaving. A Ctrl-C takes effect between two steps; it ends the
    iterator that was asked, and the engine goes on.

    Args:
        steps: What compiles the steps.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        guard: CallGuard,
        steps: Steps,
    ):
        self._engine = engine
        self._steps = steps
        self._tokenizer = tokenizer
        self._guard = guard
        self._live: dict[str, _Live] = {}  # by request id
        self._left: deque[list[str]] = deque()  # requests of iterators that were left

    @property
    def unfinished(self) -> list[Prepared]:
        """Prompts of all open iterators that have not finished."""
        return [live.prompt for live in list(self._live.values())]

    def run(self, prompts: Sequence[Prepared]) -> Iterator[Delta]:
        """Run prompts together and yield their text as it grows.

        The fewest steps that they need are compiled first. An abandoned iterator aborts what is
        left of its prompts. EngineError is raised when the engine is closed, or a step fails.
        """
        seeds: dict[str, int] = {}  # by request id, of those that were submitted
        inbox: deque[TokenEvent] = deque()
        try:
            with self._guard:
                # In one turn with submitting: steps are compiled for all that runs together.
                self._end()
                self._steps.begin([*self.unfinished, *prompts])
                for p in prompts:
                    seeds[p.request.id] = self._engine.submit(p.request)
                    self._live[p.request.id] = _Live(p, inbox)
            unfinished = OpenPrompts(prompts, list(seeds.values()), self._tokenizer, self._stop)
            while unfinished:
                yield from self._next(inbox, unfinished, seeds)
        finally:
            # Whoever computes the next step aborts them, should this thread have to wait for that.
            self._left.append(list(seeds))
            # Garbage collection runs this on whatever thread it comes to, and whoever has the guard
            # may wait for that very thread's compile.
            if not compiles_here():
                with self._guard:
                    self._end()

    def _next(
        self, inbox: deque[TokenEvent], unfinished: OpenPrompts, request_ids: Iterable[str]
    ) -> list[Delta]:
        """Return the next deltas of an iterator with these requests; none when all have ended."""
        with self._guard.holding_interrupts():
            deltas = self._take(inbox, unfinished)
            while unfinished and not deltas:
                deltas = self._turn(inbox, unfinished, request_ids)
            return deltas

    def _turn(
        self, inbox: deque[TokenEvent], unfinished: OpenPrompts, request_ids: Iterable[str]
    ) -> list[Delta]:
        """Run a step, unless another thread's has brought events, and return what became final.

        The events are taken in before another thread has its turn: a step that was computed for a
        choice whose stop string has come would be computed for nothing.
        """
        with self._guard:
            try:
                if not inbox:
                    self._step()
                deltas = self._take(inbox, unfinished)
                self._guard.pass_on()
            except BaseException:
                # Here, where a further Ctrl-C cannot keep the requests from being aborted.
                self._left.append(list(request_ids))
                self._end()
                raise
            return deltas

    def _take(self, inbox: deque[TokenEvent], unfinished: OpenPrompts) -> list[Delta]:
        """Take in the events that have come for an iterator; return what became final."""
        deltas = []
        for _ in range(len(inbox)):
            event = inbox.popleft()
            delta = unfinished.take(event)
            if event.request_id not in unfinished:
                self._live.pop(event.request_id, None)
            if delta:
                deltas.append(delta)
        return deltas

    def _stop(self, request_id: str, index: int) -> TokenEvent | None:
        with self._guard:
            return self._engine.stop(request_id, index)

    def _step(self) -> None:
        """Run one step of the engine and put its events into the inboxes of all iterators."""
        self._abort_left()
        self._engine.check_usable()
        if not self._engine.has_work:
            raise EngineError("the engine is idle while a request waits for its end")
        self._steps.install()
        for event in self._engine.step():
            # Another thread's iterator may take its request out at any time.
            if live := self._live.get(event.request_id):
                live.inbox.append(event)

    def _end(self) -> None:
        """End the iterators that were left."""
        self._abort_left()
        while not self._live and self._engine.has_work:
            # Without another iterator no later step would run, and the aborted requests would keep
            # their pages.
            self._step()
        if not self._live:
            self._steps.rest()

    def _abort_left(self) -> None:
        """Abort the requests of iterators that were left, as far as they have not ended."""
        while self._left:
            for request_id in self._left.popleft():
                self._live.pop(request_id, None)
                self._engine.abort(request_id)


def with_bar(deltas: Iterable[Delta], choices: int, bar: Bar) -> Iterator[Delta]:
    """Pass deltas on; the bar shows how many choices are finished, and the rate of tokens."""
    finished = 0
    tokens = 0
    began = 0.0
    for delta in deltas:
        began = began or time.monotonic()  # what came before was compiling
        tokens += len(delta.token_ids)
        finished += delta.completion is not None
        seconds = time.monotonic() - began
        # Over a shorter time the tokens of one step would make a rate of their own.
        rate = f"{tokens / seconds:,.0f} tokens/s" if tokens and seconds > 0.1 else ""
        bar.update(finished, choices, rate)
        yield delta
