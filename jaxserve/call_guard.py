"""Guard of the calls of an LLM: threads take turns, and interrupts wait."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from jaxserve.errors import EngineError
from jaxserve.interrupts import HeldInterrupts

WAIT = 0.1  # seconds between two looks whether a call that waits for its turn was interrupted
FORKED = (
    "this LLM was made in another process, of which this one is a fork: JAX does not work in forks "
    "(make the LLM in this process, and start it with the method spawn or forkserver)"
)


class CallGuard(HeldInterrupts):
    """HeldInterrupts in which one thread at a time is; others wait until it leaves.

    EngineError is raised in a fork of the process that made the guard, where threads of JAX would
    be waited for without end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.RLock()
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
        self.check_process()  # before the lock, which a lost thread may hold
        super().__enter__()
        try:
            while not self._turn.acquire(timeout=WAIT):
                self.pass_on()
        except BaseException:
            super().__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._turn.release()
        super().__exit__()
