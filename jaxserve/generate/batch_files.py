"""The files of a batch in OpenAI's format: requests, one per line, and their answers.

Format: https://developers.openai.com/api/docs/guides/batch. Answers may come in any order. They
are appended as they come, so that a run that was killed goes on where it was.
"""

import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self

from jaxserve.errors import JaxserveError, flag_error
from jaxserve.server.http.json import dumps, loads

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
FIELDS = ("custom_id", "method", "url", "body")
LONGEST_LINE = 64 * 2**20  # bytes
BLOCK = 2**20  # bytes that are read at a time behind the end of a line that is too long
PREFIX = "batch_req_"  # of the ids of answers
BEGIN = f'{{"id":"{PREFIX}'.encode()  # of every answer
LOCK_SECONDS = 60.0  # a process that was killed on another host may hold its lock for a while


class LineError(JaxserveError):
    """A line of the batch is no request; the other lines are not affected."""

    def __init__(self, problem: str, custom_id: str | None = None):
        super().__init__(problem)
        self.custom_id = custom_id


@dataclass(frozen=True)
class BatchRequest:
    """A line of the batch, which asks for one answer.

    Attributes:
        id: Id of the answer, which depends on what is asked.
        url: Path that the body is for, one of URLS.
        body: Body of the request, as JSON.
    """

    id: str
    custom_id: str
    url: str
    body: bytes


def check_batch_file(path: Path) -> None:
    """Raise ConfigError unless the file can be read twice."""
    _require_regular("--batch-file", path, path.stat().st_mode)


def read_lines(path: Path, longest: int = LONGEST_LINE) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers, from 1, one at a time; empty ones are left out.

    Of a line of more than `longest` bytes one byte more is yielded, and the rest left out.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(longest + 1):
            number += 1
            is_whole = line.endswith(b"\n")
            while not is_whole and (rest := file.readline(BLOCK)):
                is_whole = rest.endswith(b"\n")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def parse_line(line: bytes, longest: int = LONGEST_LINE) -> BatchRequest:
    """Return the request of a line; LineError says what is wrong with it."""
    if len(line) > longest:
        raise LineError(f"the line has more than {longest} bytes; make several requests of it")
    try:
        given = loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(f"the line is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise LineError("the line is no JSON object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str):
        raise LineError(f"custom_id is {custom_id!r:.80}; give a string")
    if unknown := [name for name in given if name not in FIELDS]:
        raise LineError(f"{unknown[0]!r:.80} is no field of a request; leave it out", custom_id)
    if given.get("method", "POST") != "POST":
        raise LineError(f"method is {given['method']!r:.80}; give POST", custom_id)
    url = given.get("url")
    if url not in URLS:
        raise LineError(f"url is {url!r:.80}; give one of {', '.join(URLS)}", custom_id)
    body = given.get("body")
    if not isinstance(body, dict):
        raise LineError(f"body is {body!r:.80}; give a JSON object", custom_id)
    if body.get("stream"):
        problem = "body.stream is set, but answers of a batch are whole; leave it out"
        raise LineError(problem, custom_id)
    id = _digest(json.dumps([custom_id, url, body], sort_keys=True).encode())
    return BatchRequest(id, custom_id, url, dumps(body))


class BatchOutput:
    """The file of answers, which one process at a time has open.

    A torn last line, which a killed process leaves behind, is cut off.

    Attributes:
        answered: Ids of the answers that the file has, by custom id.
        refused: Ids of the errors that the file has of lines that are no requests.

    Raises:
        ConfigError: The file cannot be written, another process writes it, or it has something else
            in it than answers to a batch.
    """

    def __init__(self, path: Path):
        self.answered: dict[str, str] = {}
        self.refused: set[str] = set()
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
        head = {"status_code": status, "request_id": request_id}
        response = dumps(head)[:-1] + b',"body":' + body + b"}"
        self._append(request.id, request.custom_id, response, b"null")

    def refuse(self, number: int, line: bytes, error: LineError) -> bool:
        """Append the error of a line that is no request; return False if the file has it."""
        id = _digest(b"%d %s" % (number, line))
        if id in self.refused:
            return False
        told = {"code": "invalid_line", "message": f"line {number}: {error}", "line": number}
        self._append(id, error.custom_id, b"null", dumps(told))
        return True

    def _append(self, id: str, custom_id: str | None, response: bytes, error: bytes) -> None:
        head = dumps({"id": id, "custom_id": custom_id})
        self._write(head[:-1] + b',"response":' + response + b',"error":' + error + b"}\n")

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
            if answer["error"]:
                self.refused.add(id)
            else:
                self.answered[str(answer["custom_id"])] = id
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
        return True


def _is_torn(line: bytes) -> bool:
    """Return whether a line is the beginning of an answer."""
    return line.startswith(BEGIN) or BEGIN.startswith(line)


def _digest(content: bytes) -> str:
    return PREFIX + blake2b(content, digest_size=12).hexdigest()


def _require_regular(flag: str, path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise flag_error(flag, path, "is no regular file (a pipe cannot be read again)")
