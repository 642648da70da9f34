"""Forecast of when a place in the queue comes free, for clients that found it full."""

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable

from jaxserve.server.core.pace import RunningMean
from jaxserve.server.core.wait_forecast import WaitForecast, Work

MIN_SECONDS = 0.1
MAX_SECONDS = 60.0  # the longest wait that clients accept
# Longer waits are spread below MAX_SECONDS, so that their clients do not come back together.
SPREAD_SECONDS = 20.0
# Clients try two or three times. One that comes back late loses a little time, one that comes back
# early a try.
LATE = 1.25
FIRST_GUESS = 1.0  # seconds for a place, before the engine has done a step
GONE = 5.0  # seconds after its time at which a client will not come any more
TRACKED = 64  # clients that are to come back and are compared with the places one by one
MOST_TOLD = 4096  # clients that are to come back
MOST_GONE = 32  # clients that are counted at once as having gone
# Function that returns the seconds until so many places have come free, one after the other.
PlaceTimes = Callable[[int], float]


class PlaceForecast:
    """Tells refused clients when to come back.

    A place in the queue is free when a waiting request gets its first token, for which a row has to
    be free and its prompt computed. Clients that are refused together are told different times:
    together they would find one place. Lives on the event loop.

    Args:
        clock: Function that returns the time in seconds.
    """

    def __init__(self, waits: WaitForecast, clock: Callable[[], float] = time.monotonic):
        self._waits = waits
        self._clock = clock
        self._seconds_between_places = RunningMean()
        self._last_place_at: float | None = None
        self._told: list[float] = []  # times at which refused clients come back, in order
        self._share_that_comes = RunningMean(1.0)

    # ---- places that come free

    def observe_place(self, submitted: float, others_wait: bool) -> None:
        """Take in that a place came free; another one will if `others_wait`.

        Args:
            submitted: Time at which the request that leaves the queue came.
        """
        now = self._clock()
        if self._last_place_at is not None:
            # Those that waited may have left, and the server been idle since.
            self._seconds_between_places.add(now - max(self._last_place_at, submitted))
        self._last_place_at = now if others_wait else None

    def place_times(self, work: Work) -> PlaceTimes:
        """Return the times at which places come free behind this work."""
        if not self._waits.knows_pace:
            return lambda number: number * FIRST_GUESS
        rows = self._waits.row_times(work)
        # The time between places so far covers what is not modelled, such as prompts that take
        # long or are computed by other servers, grammars, and pages. By itself it would say little:
        # rows that began together end together.
        between = self._seconds_between_places.value
        return lambda number: max(
            rows.seconds_to(1 + int((number - 1) * work.choices)), number * between
        )

    # ---- who comes back when

    def note_arrival(self) -> None:
        """Note that a client asks for a place: the next one, if any, that was told to come now."""
        now = self._clock()
        gone = bisect_left(self._told, now - GONE)
        for _ in range(min(gone, MOST_GONE)):
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
        seconds_to = self.place_times(work)
        number = self._next_number(seconds_to) + places - 1
        seconds = max(LATE * seconds_to(number), MIN_SECONDS)
        if seconds > MAX_SECONDS:
            # Multiples of the golden ratio lie evenly between whole numbers, however many.
            share = math.modf(len(self._told) * 0.618)[0]
            seconds = MAX_SECONDS - share * SPREAD_SECONDS
        if len(self._told) < MOST_TOLD:
            insort(self._told, self._clock() + seconds)
        return seconds

    def _next_number(self, seconds_to: PlaceTimes) -> int:
        """Return the number of the first place that nobody was told to come for.

        A client that comes before its place is free, as one that was told on a guess, finds none
        and is told again: it takes no place from others. Nor do those that will never come.
        """
        now = self._clock()
        taken = 0
        free_at = now + seconds_to(1)
        for time_told in self._told[:TRACKED]:
            if time_told >= free_at:
                taken += 1
                free_at = now + seconds_to(taken + 1)
        taken += max(0, len(self._told) - TRACKED)
        return 1 + math.ceil(taken * self._share_that_comes.value)
