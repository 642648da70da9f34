"""The files of a batch in OpenAI's format: requests, one per line, and their answers.

Answers may come in any order. They are appended as they come, so that a run that was killed goes on
where it was. The last record of a custom id counts.
"""

import fcntl
import json
import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from jaxserve.flag_errors import flag_error
from jaxserve.generate.batch_format import (
    LONGEST_LINE,
    PREFIX,
    BatchRequest,
    LineError,
    answer_line,
    digest,
    lines_of,
    parse_line,
    refusal_line,
)

BEGIN = f'{{"id":"{PREFIX}'.encode()  # of every answer
# Statuses of errors that need not be there when the same command is given again, such as that of a
# model's name, which --served-model-name changes; those from 500 on are of this kind as well.
PASSING = (404, 408, 409, 429)
LOCK_SECONDS = 60.0  # a process that was killed on another host may hold its lock for a while


def check_batch_file(path: Path) -> None:
    """Raise ConfigError unless the file can be read twice."""
    _require_regular("--batch-file", path, path.stat().st_mode)


def read_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, see `lines_of`."""
    with path.open("rb") as file:
        yield from lines_of(file, longest)


def read_requests(path: Path) -> Iterator[tuple[int, bytes, BatchRequest | LineError]]:
    """Yield number and text of each line with its request, or with what is wrong with the line."""
    ids: set[str | None] = set()  # custom ids of the requests
    for number, line in read_lines(path):
        try:
            request = parse_line(line)
            if request.custom_id in ids:
                raise LineError(f"custom_id {request.custom_id!r:.80} is that of an earlier line")
        except LineError as error:
            if error.custom_id in ids:
                error.custom_id = None  # it belongs to the answer to the earlier line
            yield number, line, error
        else:
            ids.add(request.custom_id)
            yield number, line, request


class BatchOutput:
    """The file of answers, which one process at a time has open.

    A torn last line, which a killed process leaves behind, is cut off.

    Attributes:
        answered: Ids of the answers that the file has, by custom id; without errors that are tried
            again.
        refused: Ids of the errors that the file has of lines that are no requests.

    Raises:
        ConfigError: The file cannot be written, another process writes it, or it has something else
            in it than answers to a batch.
    """

    def __init__(self, path: Path):
        self.answered: dict[str | None, str] = {}
        self.refused: set[str] = set()
        self._refusals = Counter[str]()  # of this run, by the digest of the line
        self._path = path
        self._broken: OSError | None = None
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise flag_error("--output", path, f"cannot be written: {error.strerror}") from None
        try:
            _require_regular("--output", path, os.fstat(self._file.fileno()).st_mode)
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def count_lines(self, batch: Path) -> int:
        """Return the number of lines of a batch.

        Raises ConfigError where a custom id belongs to the answer to another request.
        """
        if not self.answered:  # as before a first run: nothing has to be compared
            return sum(1 for _ in read_lines(batch))
        count = 0
        for _, _, found in read_requests(batch):
            count += 1
            if isinstance(found, BatchRequest):
                self.has(found)
        return count

    def has(self, request: BatchRequest) -> bool:
        """Return whether the request is answered.

        Raises ConfigError where its custom id belongs to the answer to another request.
        """
        found = self.answered.get(request.custom_id)
        if found not in (None, request.id):
            problem = (
                f"has an answer to another request with the custom_id {request.custom_id!r:.80} "
                f"(give a new file)"
            )
            raise flag_error("--output", self._path, problem)
        return found is not None

    def answer(self, request: BatchRequest, status: int, body: bytes, request_id: str) -> None:
        """Append the reply to a request, an error included.

        Args:
            status: Status of the reply over HTTP.
            body: JSON of the reply, in one line.
            request_id: Id that the reply has.
        """
        self._write(answer_line(request, status, body, request_id))

    def refuse(self, number: int, line: bytes, error: LineError) -> bool:
        """Append the error of a line that is no request; return False if the file has it."""
        # Not by its number: a line that is put before it must not bring its error once more.
        content = digest(line)
        self._refusals[content] += 1
        id = digest(f"{content} {self._refusals[content]}".encode())
        if id in self.refused:
            return False
        self.answered.pop(error.custom_id, None)  # the last record counts
        self._write(refusal_line(id, number, error))
        return True

    def _write(self, line: bytes) -> None:
        if self._broken:
            raise self._broken
        end = os.fstat(self._file.fileno()).st_size
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            self._broken = error  # another line behind half of this one would spoil both
            self._file.truncate(end)
            raise

    def _lock(self) -> None:
        """Keep other processes from writing the file; wait a while for one that does."""
        until = time.monotonic() + LOCK_SECONDS
        told = False
        while not self._try_to_lock():
            if not told:
                told = True
                print(f"waiting for another process that writes {self._path}", file=sys.stderr)
            if time.monotonic() > until:
                raise flag_error("--output", self._path, "another process writes it")
            time.sleep(0.1)

    def _try_to_lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            problem = f"cannot be locked: {error.strerror} (give a file elsewhere)"
            raise flag_error("--output", self._path, problem) from None
        return True

    def _read(self) -> None:
        """Read what is answered already, and cut off a torn last line."""
        end = 0
        noted = b""
        with open(os.dup(self._file.fileno()), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if self._note(line):
                    noted = line
                    end += len(line)
                elif line.endswith(b"\n") or not _is_torn(line):
                    problem = f"line {number} is no answer to a batch (give a new file)"
                    raise flag_error("--output", self._path, problem)
        self._file.truncate(end)
        if noted and not noted.endswith(b"\n"):
            self._write(b"\n")

    def _note(self, line: bytes) -> bool:
        """Take note of an answer; return whether the line is one."""
        try:
            answer = json.loads(line)
            id = answer["id"]
            if not id.startswith(PREFIX):
                return False
            self.answered.pop(answer["custom_id"], None)  # the last record counts
            if answer["error"]:
                self.refused.add(id)
            elif not _passes(answer["response"]["status_code"]):
                self.answered[answer["custom_id"]] = id
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
        return True


def _is_torn(line: bytes) -> bool:
    """Return whether a line is the beginning of an answer."""
    return line.startswith(BEGIN) or BEGIN.startswith(line)


def _passes(status: int) -> bool:
    """Return whether a request with this status is worth another try."""
    return status in PASSING or status >= 500


def _require_regular(flag: str, path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise flag_error(flag, path, "is no regular file (a pipe cannot be read again)")
