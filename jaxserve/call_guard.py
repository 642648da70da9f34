"""Guard of the calls of an LLM: threads take turns, and interrupts wait."""

import os
import threading
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

    @property
    def in_fork(self) -> bool:
        """Return whether this process is a fork of the one that made the guard."""
        return os.getpid() != self._process

    def __enter__(self) -> Self:
        if self.in_fork:  # before the lock, which a lost thread may hold
            raise EngineError(FORKED)
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
