"""Timers that end answers when their time is over."""

import asyncio
from collections.abc import Callable

from jaxserve.errors import DeadlineError
from jaxserve.server.core.answer import Answer


class AnswerTimers:
    """The timers of the answers in flight. Lives on the event loop.

    Args:
        max_seconds: Seconds that any answer may take.
        clock: Function that returns the time in seconds; that of the engine.
    """

    def __init__(self, max_seconds: float, clock: Callable[[], float]) -> None:
        self._max_seconds = max_seconds
        self._clock = clock
        self._timers: dict[Answer, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def start(self, answer: Answer, deadline: float | None) -> None:
        """Fail the answer at its deadline, or after the longest time if that comes first."""
        now = self._clock()
        seconds = answer.submitted + self._max_seconds - now
        what = "--max-request-seconds has passed"
        if deadline is not None and deadline - now < seconds:
            seconds = deadline - now
            what = "the deadline has passed"
        self._timers[answer] = asyncio.get_running_loop().call_later(
            seconds, answer.fail, DeadlineError(what)
        )

    def stop(self, answer: Answer) -> None:
        """Cancel the timer of an answer that has ended."""
        self._timers.pop(answer).cancel()
