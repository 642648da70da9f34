"""Ctrl-C that ends a program at once: exit code 130, and nothing on standard error.

Programs install this handler before anything else, since until then Ctrl-C is a traceback. So this
module imports nothing that takes time.
"""

import os
import signal

INTERRUPTED = 130  # exit code, as shells report SIGINT


def exit_on_interrupt() -> None:
    """End this process at once on Ctrl-C, without a word: what it holds, the system frees.

    A shell without job control starts background jobs with SIGINT ignored; they go on ignoring it,
    as POSIX wants it of programs.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_now)


def exit_now(*_: object) -> None:
    """End this process: the handler that `exit_on_interrupt` installs."""
    os._exit(INTERRUPTED)
