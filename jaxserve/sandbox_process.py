"""A process that answers lines of JSON, and is killed when an answer takes too long."""

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Lock, Timer
from typing import Any

START_SECONDS = 60.0


class LineProcess:
    """One request after the other; for use from several threads. The process says {} in a line when
    it is ready.

    It starts with the first request. It is killed when an answer takes longer than `seconds` (of
    clock time), and whenever it has died the next request starts another.
    """

    def __init__(self, command: Sequence[str], seconds: float, max_answer_bytes: int) -> None:
        self._command, self._seconds, self._max_answer_bytes = command, seconds, max_answer_bytes
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: str) -> dict[str, Any] | None:
        """The answer to a line of JSON; None where the process crashed or was killed.

        ChildProcessError when it does not start.
        """
        with self._lock:
            return self._exchange(self._running(), request.encode() + b"\n", self._seconds)

    def close(self) -> None:
        """End the process; a later request starts another."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on a terminal is not for it
            )
            if self._exchange(self._process, b"", START_SECONDS) is None:
                raise ChildProcessError("the process does not start")
        return self._process

    def _exchange(
        self, process: subprocess.Popen[bytes], line: bytes, seconds: float
    ) -> dict[str, Any] | None:
        """The answer to a line; None, and the process is gone, when there is none in time."""
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
        except BaseException:  # Ctrl-C: the rest of the answer would be taken for the next one's
            self._end()
            raise
        finally:
            watchdog.cancel()
            watchdog.join()
        whole = answer.endswith(b"\n")
        if (
            late.is_set() or not whole
        ):  # killed though it answered at the last moment: the next request needs another
            self._end()
        return json.loads(answer) if whole else None

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # what it had not read
                if pipe:
                    pipe.close()
        self._process = None
