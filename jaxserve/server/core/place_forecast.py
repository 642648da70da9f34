"""Forecast of when a place in the queue comes free, for clients that found it full."""

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.server.core.ttft_estimate import TTFTEstimate

MIN_SECONDS = 0.1
MAX_SECONDS = 60.0  # the longest wait that clients accept
# Clients try two or three times. One that comes back late loses a little time, one that comes back
# early a try.
LATE = 1.25
FIRST_GUESS = 1.0  # seconds for a place, before the engine has done a step
KNOWN = 8  # answers after which their usual length is known
WEIGHT = 0.1  # of the newest value in a running mean
GONE = 5.0  # seconds after its time at which a client will not come any more
TRACKED = 64  # promises that are compared with the places one by one


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that is ahead of a place in the queue.

    seconds_left: of each running choice, until its row is free; in ascending order. engine_waits:
    choices wait in the engine; if rows are free, then because pages are not. choices,
    prompt_tokens, max_tokens: of a waiting request, on average.
    """

    seconds_left: Sequence[float]
    engine_waits: bool = False
    choices: float = 1.0
    prompt_tokens: float = 0.0
    max_tokens: float = 0.0


class PlaceForecast:
    """Learns how long answers take, and tells refused clients when to come back.

    A place in the queue is free when a waiting request gets its first token, for which a row has to
    be free and its prompt computed. Clients that are refused together get times of their own:
    together they would find one place. Lives on the event loop.
    """

    def __init__(
        self, rows: int, estimate: TTFTEstimate, clock: Callable[[], float] = time.monotonic
    ):
        """rows: choices that run together. estimate: of prompts. clock: in seconds."""
        self._rows = rows
        self._estimate = estimate
        self._clock = clock
        self._seconds_per_token = 0.0
        self._usual_tokens = 0.0
        self._answers = 0
        self._promises: list[float] = []  # times at which clients were told to come back, in order

    # ---- what is learnt

    def observe_step(self, seconds: float, tokens: int) -> None:
        """Take in a step that brought `tokens` tokens to each of its choices; none if it embeds."""
        if not tokens:
            return
        value = seconds / tokens
        weight = WEIGHT if self._seconds_per_token else 1.0
        self._seconds_per_token += (value - self._seconds_per_token) * weight

    def observe_answer(self, tokens: float) -> None:
        """Take in an answer that has ended, with the tokens of each of its choices."""
        self._answers += 1
        weight = max(WEIGHT, 1 / self._answers)
        self._usual_tokens += (tokens - self._usual_tokens) * weight

    # ---- what is expected

    def seconds_of(self, max_tokens: float) -> float:
        """Return how long a choice keeps its row: of the usual length, at most max_tokens."""
        known = self._answers >= KNOWN
        tokens = min(self._usual_tokens, max_tokens) if known else max_tokens
        return tokens * self._seconds_per_token

    def seconds_left(self, max_tokens: int, elapsed: float) -> float:
        """Return how long a choice keeps its row that has had it for `elapsed` seconds.

        One that takes longer than is usual is taken to go on for half as long again.
        """
        left = max(self.seconds_of(max_tokens) - elapsed, elapsed / 2)
        return max(0.0, min(left, max_tokens * self._seconds_per_token - elapsed))

    def seconds_to_place(self, number: int, work: Work) -> float:
        """Return the seconds until `number` places have come free, one after the other."""
        if not self._estimate.step_seconds:
            return number * FIRST_GUESS
        prompts = int(number * work.prompt_tokens)
        rows = self._seconds_to_row(1 + int((number - 1) * work.choices), work)
        return rows + self._estimate.seconds_to_first_token(prompts, 0)

    def _seconds_to_row(self, number: int, work: Work) -> float:
        """Return the seconds until a row has come free for the `number`-th time."""
        busy = len(work.seconds_left)
        free = 0 if work.engine_waits and busy else max(0, self._rows - busy)
        rounds, row = divmod(number - 1, free + busy)
        first = 0.0 if row < free else work.seconds_left[row - free]
        return first + rounds * self.seconds_of(work.max_tokens)

    # ---- who comes back when

    def note_arrival(self) -> None:
        """Note that a client asks for a place: the next one, if any, that was told to come now."""
        now = self._clock()
        while self._promises and self._promises[0] < now - GONE:
            self._promises.pop(0)
        if self._promises and self._promises[0] <= now:
            self._promises.pop(0)

    def promise(self, work: Work, places: int = 1) -> float:
        """Return the seconds after which a refused client finds places that nobody else was told.

        They are not reserved: who comes before takes them. places: that the client needs.
        """
        number = self._next_number(work) + places - 1
        seconds = LATE * self.seconds_to_place(number, work)
        if seconds >= MAX_SECONDS:
            return MAX_SECONDS
        seconds = max(seconds, MIN_SECONDS)
        insort(self._promises, self._clock() + seconds)
        return seconds

    def _next_number(self, work: Work) -> int:
        """Return the number of the first place that nobody was told to come for.

        A client that was told to come before its place is free will be told again: its promise
        counts for nothing.
        """
        now = self._clock()
        number = 1
        for promised in self._promises[:TRACKED]:
            if promised - now >= self.seconds_to_place(number, work):
                number += 1
        return number + max(0, len(self._promises) - TRACKED)
