"""Priority of the threads that compute on a CPU, below that of the threads that serve clients."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

THREADS = Path("/proc/self/task")  # of Linux, which alone has a priority for each thread
COMPUTING = "tf_XLA"  # with which the names of XLA's threads begin
# A thread of this niceness gets half of the time of a usual one that wants the same processor.
NICENESS = 3

log = logging.getLogger("jaxserve.serve")


def lower_compute_priority() -> None:
    """Let all other threads of the process go before those of XLA.

    A server that computes on the processors keeps all of them busy, and the threads that serve
    clients would wait for their turn several times for each message. Does nothing on systems other
    than Linux, and logs a warning where the system does not allow it.
    """
    try:
        for thread in _computing_threads():
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS  # 0: of this thread
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
    except OSError as error:
        log.warning("the threads that compute keep their priority, and clients may wait: %s", error)


def _computing_threads() -> Iterator[int]:
    """Yield the system's ids of XLA's threads in this process."""
    for folder in THREADS.glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if (folder / "comm").read_text().startswith(COMPUTING):
                yield int(folder.name)
