"""Ctrl-C at any moment: programs exit with 130 and no traceback, and engines survive.

Python turns SIGINT into KeyboardInterrupt, which is not enough. In a program that other programs
call it becomes a traceback during the imports of the start, and in a destructor or in a callback of
a C library Python prints the exception and goes on as if nothing had happened. In the middle of an
engine's step it leaves a step behind that nobody reads, and lists that are half changed.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

INTERRUPTED = 130  # exit code, as shells report SIGINT
PATIENCE = 5.0  # seconds after which a further Ctrl-C takes effect wherever the program is


def exit_on_interrupt() -> None:
    """End this process at once on Ctrl-C, without a word: what it holds, the system frees.

    A shell without job control starts background jobs with SIGINT ignored; they go on ignoring it,
    as POSIX wants it of programs.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C in this block, for code that has something to put back."""
    if signal.getsignal(signal.SIGINT) is not _exit:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _exit)


def _exit(*_: object) -> None:
    os._exit(INTERRUPTED)


class HeldInterrupts:
    """Context in which a Ctrl-C takes effect at the end, or where `pass_on` is called.

    Nothing is left half done: no step that nobody reads, no list that is half changed. The context
    may be entered again inside of itself or of another one: the outermost block counts. A second
    Ctrl-C is noted like the first, unless the first came more than PATIENCE seconds before: then
    what runs may hang, and it takes effect at once.

    Only the main thread is interrupted by signals; on other threads the context does nothing. Nor
    does it where SIGINT is ignored, ends the process, or is handled outside of Python.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._since: float | None = None  # time of the first Ctrl-C that was not passed on

    def __enter__(self) -> Self:
        if _on_main_thread():
            if self._depth == 0:
                self._take_over()
            self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        if not _on_main_thread():
            return
        self._depth -= 1
        if self._depth == 0 and self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self.pass_on()

    def pass_on(self) -> None:
        """Let a Ctrl-C that was noted take effect: as a rule KeyboardInterrupt is raised."""
        if self._since is not None:
            self._since = None
            assert self._before, "only its own handler notes a Ctrl-C"
            self._before(signal.SIGINT, None)

    def _take_over(self) -> None:
        self._before = self._since = None
        before = signal.getsignal(signal.SIGINT)
        is_held = isinstance(getattr(before, "__self__", None), HeldInterrupts)
        if callable(before) and before is not _exit and not is_held:
            self._before = before
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since > PATIENCE:
            self.pass_on()


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
