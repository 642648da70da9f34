"""Exit codes of the programs, and the line on standard error that goes with them."""

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
EXPECTED = (
    *(JaxserveError, CheckpointError, TokenizerError),
    *(ShardingError, KernelError, ChipError),
)
BAD_INPUT = 2
PIPE_CLOSED = 141  # as shells report SIGPIPE


def complain(error: object) -> int:
    """Print an error as one line on standard error, and return the exit code for it."""
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT


def exit_code(work: Callable[[], int]) -> int:
    """Do the work of a program and return the exit code.

    The work's own; 2 for an expected error, 130 after Ctrl-C, 141 if standard output was closed.
    """
    try:
        return work()
    except EXPECTED as error:
        return complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at its end, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
