"""Child process that answers lines of JSON, and is killed when an answer takes too long."""

import json
import os
import subprocess
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Lock, Timer
from typing import Any

from jaxserve.interrupts import HeldInterrupts

START_SECONDS = 60.0  # until a new process is ready, on a busy machine


class LineProcess:
    """Child process that answers one request after the other; for use from several threads.

    The process starts with the first request, and writes the line {} when it is ready. It is killed
    when an answer takes longer than `seconds` of clock time; after its death the next request
    starts another one. It ends with this object, or with the program, at the latest. Answers are at
    most `max_answer_bytes` long.
    """

    def __init__(self, command: Sequence[str], seconds: float, max_answer_bytes: int) -> None:
        self._command = command
        self._seconds = seconds
        self._max_answer_bytes = max_answer_bytes
        self._lock = Lock()
        self._interrupts = HeldInterrupts()
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: Callable[[], object] = lambda: None

    def ask(self, request: str) -> dict[str, Any] | None:
        """Return the answer to a line of JSON; None where the process crashed or was killed.

        ChildProcessError is raised when the process does not start.
        """
        # A Ctrl-C while a process starts would lose the process, and later it would lose the timer
        # that kills it.
        with self._lock, self._interrupts:
            return self._exchange(self._running(), request.encode() + b"\n", self._seconds)

    def close(self) -> None:
        """End the process; a later request starts another."""
        with self._lock, self._interrupts:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process, started if there is none."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on a terminal does not reach the process
            )
            self._ending = weakref.finalize(self, _end, self._process, os.getpid())
            if self._exchange(self._process, b"", START_SECONDS) is None:
                raise ChildProcessError("the process does not start")
        return self._process

    def _exchange(
        self, process: subprocess.Popen[bytes], line: bytes, seconds: float
    ) -> dict[str, Any] | None:
        """Return the answer to a line; without one in time, end the process and return None."""
        assert process.stdin and process.stdout
        late = Event()

        def kill() -> None:
            late.set()
            process.kill()

        watchdog = Timer(seconds, kill)
        watchdog.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline(self._max_answer_bytes)
        except BrokenPipeError:
            answer = b""
        except BaseException:
            # After Ctrl-C the rest of this answer would be taken for the next request's.
            self._end()
            raise
        finally:
            watchdog.cancel()
            watchdog.join()
        whole = answer.endswith(b"\n")
        # A process may answer just before it is killed: the answer counts, the process is gone.
        if late.is_set() or not whole:
            self._end()
        return json.loads(answer) if whole else None

    def _end(self) -> None:
        """Kill the process, if any, and close its pipes."""
        self._ending()
        self._process = None


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    """Kill a process and close its pipes; in a fork of its parent, close them only."""
    if os.getpid() == parent:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):  # closing flushes what the process has not read
            if pipe:
                pipe.close()
