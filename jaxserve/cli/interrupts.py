"""Ctrl-C at any moment of a program's life: exit code 130, and no traceback.

Python turns SIGINT into KeyboardInterrupt. That is not enough for a program that other programs
call: during the imports of the start it becomes a traceback, and in a destructor or in a callback
of a C library Python prints the exception and goes on as if nothing had happened.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # exit code, as shells report SIGINT


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
