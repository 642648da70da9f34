"""Exit codes of the programs, and the line on standard error that goes with them."""

import errno
import os
import sys
from collections.abc import Callable

from jaxserve.checkpoints.errors import CheckpointError
from jaxserve.errors import JaxserveError
from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.sharding.errors import ChipError, ShardingError
from jaxserve.sigint import INTERRUPTED
from jaxserve.tokenizer import TokenizerError

# What a request or a flag can lead to: one line on standard error, and no traceback.
EXPECTED = (JaxserveError, CheckpointError, TokenizerError, ShardingError, KernelError, ChipError)
BAD_INPUT = 2
PIPE_CLOSED = 141  # as shells report SIGPIPE
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def complain(error: object) -> int:
    """Print an error as one line on standard error, and return the exit code for it."""
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT


def exit_code(work: Callable[[], int]) -> int:
    """Do the work of a program and return the exit code.

    The work's own; 2 for an expected error or output that cannot be written, 130 after Ctrl-C, 141
    if standard output was closed.
    """
    try:
        code = work()
        if sys.stdout:  # None if it was closed before the start
            sys.stdout.flush()  # Python does so at its end, where an error is no exception
        return code
    except EXPECTED as error:
        return complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except OSError as error:
        # Where a file cannot be opened, the error has its name.
        if error.filename is not None or error.errno not in NO_ROOM:
            raise
        _drop_output()
        return complain(f"the output cannot be written: {error.strerror}")


def _drop_output() -> None:
    """Lead standard output nowhere: Python flushes it once more at its end, and would fail."""
    if sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
