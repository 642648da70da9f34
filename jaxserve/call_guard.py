"""Guard of the calls of an LLM: threads take turns, and interrupts wait."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from jaxserve.errors import EngineError
from jaxserve.interrupts import HeldInterrupts

WAIT = 0.1  # seconds between two looks whether a call that waits for its turn was interrupted
FORKED = (
    "this LLM was made in another process, of which this one is a fork: JAX does not work in forks "
    "(make the LLM in this process, and start it with the method spawn or forkserver)"
)


class _Place:
    """Place of a thread in a line."""

    def __init__(self) -> None:
        self.entered = 0  # times, without those that it has left again
        self.call = threading.Lock()  # released when the thread is to look whether it is first
        self.call.acquire()


class _OwnPlace(threading.local):
    """The calling thread's place."""

    def __init__(self) -> None:
        self.place = _Place()


class _Line:
    """Line of threads, of which the first has the turn; it may enter again.

    An RLock would let a thread that leaves and enters again go before those that wait. Garbage
    collection may enter and leave anywhere in these methods, on the same thread, so they hold no
    lock: each change of the line is a single call of a deque.
    """

    def __init__(self) -> None:
        self._own = _OwnPlace()
        self._places: deque[_Place] = deque()

    def enter(self, while_waiting: Callable[[], None]) -> None:
        """Wait for the turn; an exception of `while_waiting`, called now and then, ends that."""
        place = self._own.place
        if not place.entered:
            self._places.append(place)
        place.entered += 1
        try:
            while self._places[0] is not place:
                # Called too late, or not at all, the thread finds out by itself.
                if not place.call.acquire(timeout=WAIT):
                    while_waiting()
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Let the next thread have the turn, unless this one has entered more than once."""
        place = self._own.place
        place.entered -= 1
        if place.entered:
            return
        self._places.remove(place)
        if self._places:
            # It may be called already, or have left.
            with suppress(RuntimeError, IndexError):
                self._places[0].call.release()


class CallGuard(HeldInterrupts):
    """HeldInterrupts in which one thread at a time is; others wait in line until it leaves.

    EngineError is raised in a fork of the process that made the guard, where threads of JAX would
    be waited for without end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._line = _Line()
        self._process = os.getpid()
        self._closed = ""

    @property
    def in_fork(self) -> bool:
        """Return whether this process is a fork of the one that made the guard."""
        return os.getpid() != self._process

    def close(self, why: str) -> None:
        """Let `pass_on` raise EngineError from now on, on whatever thread; `why` is its text."""
        self._closed = why

    def pass_on(self) -> None:
        """Let a Ctrl-C that was noted take effect, and end work that a closed LLM has no use for.

        Raises EngineError once the guard was closed.
        """
        if self._closed:
            raise EngineError(self._closed)
        super().pass_on()

    @contextmanager
    def holding_interrupts(self) -> Iterator[None]:
        """Let a Ctrl-C wait as inside of the guard, but keep no other thread out."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__()

    def check_process(self) -> None:
        """Raise EngineError in a fork of the process that made the guard."""
        if self.in_fork:
            raise EngineError(FORKED)

    def __enter__(self) -> Self:
        self.check_process()  # first, as a lost thread may have the turn
        super().__enter__()
        try:
            self._line.enter(self.pass_on)
        except BaseException:
            super().__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._line.leave()
        super().__exit__()
