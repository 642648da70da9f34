"""Ctrl-C in code that has something to put back: programs unwind, and engines survive.

Everywhere else it ends a program at once, see jaxserve.sigint. Python turns SIGINT into
KeyboardInterrupt, which is not enough. In a destructor or in a callback of a C library Python
prints the exception and goes on as if nothing had happened. In the middle of an engine's step it
leaves a step behind that nobody reads, and lists that are half changed.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from jaxserve.sigint import exit_now

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

PATIENCE = 5.0  # seconds after which a further Ctrl-C takes effect wherever the program is
AGAIN = 0.05  # seconds until a KeyboardInterrupt that Python has dropped is raised again


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C in this block, for code that has something to put back.

    Where Python can only drop the exception, as in a destructor, it is raised again a moment later.
    Without effect in programs that have not called `exit_on_interrupt`.
    """
    if signal.getsignal(signal.SIGINT) is not exit_now:
        yield
        return
    hook = sys.unraisablehook
    sys.unraisablehook = _raise_again(hook)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, exit_now)
        sys.unraisablehook = hook


def _raise_again(
    hook: "Callable[[UnraisableHookArgs], Any]",
) -> "Callable[[UnraisableHookArgs], None]":
    """Return a hook that repeats a Ctrl-C which was dropped, and passes other exceptions on."""

    def repeat(dropped: "UnraisableHookArgs") -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            hook(dropped)
            return
        # Raised in here it would be dropped again.
        threading.Timer(AGAIN, os.kill, (os.getpid(), signal.SIGINT)).start()

    return repeat


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Let Ctrl-C do after this block what it did before, for blocks that run an event loop.

    A loop whose signal handlers are removed leaves Python's own handler of SIGINT behind.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None:  # a handler that was not installed from Python
            signal.signal(signal.SIGINT, before)


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
        """Let a Ctrl-C that was noted take effect: as a rule KeyboardInterrupt is raised.

        On other threads than the main one nothing happens: it was not for them.
        """
        if _on_main_thread() and self._since is not None:
            self._since = None
            assert self._before, "only its own handler notes a Ctrl-C"
            self._before(signal.SIGINT, None)

    def _take_over(self) -> None:
        self._before = self._since = None
        before = signal.getsignal(signal.SIGINT)
        is_held = isinstance(getattr(before, "__self__", None), HeldInterrupts)
        if callable(before) and before is not exit_now and not is_held:
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
