"""Forecast of when a place in the queue comes free, for clients that found it full."""

import math
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from jaxserve.server.core.ttft_estimate import TTFTEstimate

MIN_SECONDS = 0.1
MAX_SECONDS = 60.0  # the longest wait that clients accept
# Longer waits are spread below MAX_SECONDS, so that their clients do not come back together.
SPREAD_SECONDS = 20.0
# Clients try two or three times. One that comes back late loses a little time, one that comes back
# early a try.
LATE = 1.25
FIRST_GUESS = 1.0  # seconds for a place, before the engine has done a step
FIRST_TOKENS = 512  # of an answer, before the usual length is known
KNOWN = 8  # answers after which their usual length is known
REMEMBERED = 32  # answers
WEIGHT = 0.1  # of the newest value in a running mean
GONE = 5.0  # seconds after its time at which a client will not come any more
TRACKED = 64  # clients that are to come back and are compared with the places one by one
MOST_TOLD = 4096  # clients that are to come back


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that is ahead of a place in the queue."""

    seconds_left: Sequence[float]  # of each running choice, until its row is free; ascending
    # Choices wait in the engine, so that a row that is free cannot be used, for lack of pages.
    engine_waits: bool = False
    choices: float = 1.0  # of a waiting request, on average
    prompt_tokens: float = 0.0  # of a waiting request, on average; 0: no prompt is known yet
    max_tokens: float = 0.0  # of a waiting request, on average


class PlaceForecast:
    """Learns how long answers take, and tells refused clients when to come back.

    A place in the queue is free when a waiting request gets its first token, for which a row has to
    be free and its prompt computed. Clients that are refused together are told different times:
    together they would find one place. Lives on the event loop.

    Args:
        rows: Number of choices that run together.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self, rows: int, estimate: TTFTEstimate, clock: Callable[[], float] = time.monotonic
    ):
        self._rows = rows
        self._estimate = estimate
        self._clock = clock
        self._seconds_per_token = _Mean()
        self._seconds_between_places = _Mean()
        self._last_place_at: float | None = None
        self._lengths: deque[float] = deque(maxlen=REMEMBERED)
        self._usual_tokens = float(FIRST_TOKENS)
        self._told: list[float] = []  # times at which refused clients come back, in order
        self._share_that_comes = _Mean(1.0)

    # ---- what is learnt

    def observe_step(self, seconds: float, tokens: int) -> None:
        """Take in a step that brought `tokens` tokens to each of its choices; 0 if it embeds."""
        if tokens:
            self._seconds_per_token.add(seconds / tokens)

    def observe_answer(self, tokens: float) -> None:
        """Take in an answer that has ended, with the tokens of each of its choices."""
        self._lengths.append(tokens)
        if len(self._lengths) >= KNOWN:
            self._usual_tokens = median(self._lengths)
        else:
            self._usual_tokens = max(2 * max(self._lengths), FIRST_TOKENS)

    def observe_place(self, others_wait: bool) -> None:
        """Take in that a place came free; another one will if `others_wait`."""
        now = self._clock()
        if self._last_place_at is not None:
            self._seconds_between_places.add(now - self._last_place_at)
        self._last_place_at = now if others_wait else None

    # ---- what is expected

    def seconds_of(self, max_tokens: float) -> float:
        """Return how long a choice keeps its row: of the usual length, at most max_tokens."""
        return min(self._usual_tokens, max_tokens) * self._seconds_per_token.value

    def seconds_left(self, max_tokens: int, elapsed: float) -> float:
        """Return how long a choice keeps its row that has had it for `elapsed` seconds.

        One that takes longer than is usual is taken to go on for half as long again.
        """
        left = max(self.seconds_of(max_tokens) - elapsed, elapsed / 2)
        return max(0.0, min(left, max_tokens * self._seconds_per_token.value - elapsed))

    def seconds_to_place(self, number: int, work: Work) -> float:
        """Return the seconds until `number` places have come free, one after the other."""
        if not self._estimate.step_seconds:
            return number * FIRST_GUESS
        row = self._seconds_to_row(1 + int((number - 1) * work.choices), work)
        prompts = int(number * work.prompt_tokens)
        modelled = row + self._estimate.seconds_to_first_token(prompts, 0)
        # The time between places so far covers what is not modelled, such as prompts that take
        # longer than at best or are computed by other servers, grammars, and pages. By itself it
        # would say little: rows that began together end together.
        return max(modelled, number * self._seconds_between_places.value)

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
        gone = bisect_left(self._told, now - GONE)
        for _ in range(min(gone, REMEMBERED)):
            self._share_that_comes.add(0.0)
        del self._told[:gone]
        if self._told and self._told[0] <= now:
            self._share_that_comes.add(1.0)
            del self._told[0]

    def come_back_in(self, work: Work, places: int = 1) -> float:
        """Return how many seconds a refused client that needs `places` places should wait.

        Each client gets the time of another place. Places are not reserved: who comes before takes
        them.
        """
        number = self._next_number(work) + places - 1
        seconds = max(LATE * self.seconds_to_place(number, work), MIN_SECONDS)
        if seconds > MAX_SECONDS:
            # Multiples of the golden ratio lie evenly between whole numbers, however many.
            share = math.modf(len(self._told) * 0.618)[0]
            seconds = MAX_SECONDS - share * SPREAD_SECONDS
        if len(self._told) < MOST_TOLD:
            insort(self._told, self._clock() + seconds)
        return seconds

    def _next_number(self, work: Work) -> int:
        """Return the number of the first place that nobody was told to come for.

        A client that comes before its place is free, as one that was told on a guess, finds none
        and is told again: it takes no place from others. Nor do those that will never come.
        """
        now = self._clock()
        taken = 0
        for time_told in self._told[:TRACKED]:
            if time_told - now >= self.seconds_to_place(taken + 1, work):
                taken += 1
        taken += max(0, len(self._told) - TRACKED)
        return 1 + math.ceil(taken * self._share_that_comes.value)


class _Mean:
    """Running mean in which older values count less; the first value counts alone."""

    def __init__(self, value: float = 0.0):
        self.value = value
        self._is_empty = not value

    def add(self, value: float) -> None:
        weight = 1.0 if self._is_empty else WEIGHT
        self.value += (value - self.value) * weight
        self._is_empty = False
