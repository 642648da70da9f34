"""Lines of a batch in OpenAI's format: requests, and their answers.

Format: https://developers.openai.com/api/docs/guides/batch.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

from jaxserve.errors import JaxserveError
from jaxserve.server.http.json import dumps, loads

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
FIELDS = ("custom_id", "method", "url", "body")
LONGEST_LINE = 64 * 2**20  # bytes
BLOCK = 2**20  # bytes that are read at a time behind the end of a line that is too long
PREFIX = "batch_req_"  # of the ids of answers


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
        body: Body of the request, as JSON; without request_id, as lines that run together may have
            the same one.
    """

    id: str
    custom_id: str
    url: str
    body: bytes


def lines_of(file: BinaryIO, longest: int = LONGEST_LINE) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, from 1, one at a time; without empty ones.

    Of a line of more than `longest` bytes one byte more is yielded, and the rest left out.
    """
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
    try:
        id = digest(json.dumps([custom_id, url, body], sort_keys=True).encode())
        body.pop("request_id", None)
        return BatchRequest(id, custom_id, url, dumps(body))
    except RecursionError:
        raise LineError("body is nested too deeply", custom_id) from None


def id_of_line(line: bytes) -> str:
    """Return the id of the answer to a line, or of its error."""
    try:
        return parse_line(line).id
    except LineError:
        return digest(line)


def digest(content: bytes) -> str:
    """Return the id of an answer to what has this content."""
    return PREFIX + blake2b(content, digest_size=12).hexdigest()


def answer_line(request: BatchRequest, status: int, body: bytes, request_id: str) -> bytes:
    """Return the line of an answer.

    Args:
        request: Request that is answered.
        status: Status of the reply over HTTP, which may be that of an error.
        body: JSON of the reply, in one line.
        request_id: Id that the reply has.
    """
    head = {"status_code": status, "request_id": request_id}
    response = dumps(head)[:-1] + b',"body":' + body + b"}"
    return _line(request.id, request.custom_id, response, b"null")


def refusal_line(id: str, number: int, error: LineError) -> bytes:
    """Return the line for one that is no request, by its number."""
    told = {"code": "invalid_line", "message": f"line {number}: {error}", "line": number}
    return _line(id, error.custom_id, b"null", dumps(told))


def failure_line(request: BatchRequest, code: str, problem: str) -> bytes:
    """Return the line for a request that no server could answer."""
    told: dict[str, Any] = {"code": code, "message": problem, "line": None}
    return _line(request.id, request.custom_id, b"null", dumps(told))


def _line(id: str, custom_id: str | None, response: bytes, error: bytes) -> bytes:
    head = dumps({"id": id, "custom_id": custom_id})
    return head[:-1] + b',"response":' + response + b',"error":' + error + b"}\n"
