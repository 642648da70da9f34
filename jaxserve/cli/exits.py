"""How the programs end: their exit codes, and the one line that says why."""

import os
import sys
from collections.abc import Callable

BAD_INPUT = 2
INTERRUPTED, PIPE_CLOSED = 130, 141  # what a shell reports for SIGINT and SIGPIPE


def complain(error: object) -> int:
    """One line on standard error; the exit code that goes with it."""
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT


def exit_code(work: Callable[[], int], expected: tuple[type[Exception], ...]) -> int:
    """Of the work: its own; 2 for an expected error, 130 after Ctrl-C, 141 when nobody reads
    standard output.
    """
    try:
        return work()
    except expected as error:
        return complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # so that Python's own last flush succeeds
        return PIPE_CLOSED
