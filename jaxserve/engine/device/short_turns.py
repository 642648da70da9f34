"""Short turns of Python's threads, while some of them lower steps beside an engine."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_SECONDS = 0.0005  # for which a thread may keep the GIL from others


class ShortTurns:
    """Lets the threads of the process take the GIL from each other sooner in its blocks.

    Lowering is Python, and the engine needs the GIL several times in each step: with turns of the
    usual 5 ms, steps of 3 ms took 60.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0  # that have begun and not ended
        self._usual = 0.0  # of the program, in seconds

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take short turns for the time of a block; blocks may overlap."""
        with self._lock:
            if not self._blocks:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(TURN_SECONDS)
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    sys.setswitchinterval(self._usual)


SHORT_TURNS = ShortTurns()  # of the process, as the interval is
