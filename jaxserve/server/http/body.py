"""Read a request: its body as a checked model, and how long the client will wait."""

import re
import time
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.errors import (
    BodyError,
    BodyTooLargeError,
    MediaTypeError,
)
from jaxserve.server.http.ignored import note_ignored
from jaxserve.server.http.json import MEDIA_TYPE, loads
from jaxserve.server.http.types import Body

TIMEOUT = "x-request-timeout"  # header: seconds that the client will wait
SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


async def read_with_timeout[T: Body](
    request: Request, kind: type[T], limits: Limits
) -> tuple[T, float | None]:
    """Read the body; return it with the seconds that the client still waits (None: no limit)."""
    timeout = timeout_of(request)
    began = time.monotonic()
    body = await read(request, kind, limits)
    if timeout is None:
        return body, None
    return body, timeout - (time.monotonic() - began)


def timeout_of(request: Request) -> float | None:
    """Return the seconds of the X-Request-Timeout header, or None without one.

    RequestError for anything but a positive number in digits, such as 30 or 0.5.
    """
    text = request.headers.get(TIMEOUT)
    if text is None:
        return None
    seconds = float(text) if SECONDS.fullmatch(text) else 0.0
    if seconds <= 0:
        raise RequestError(TIMEOUT, f"is {text!r:.80}; it must be a number of seconds above 0")
    return seconds


async def read[T: Body](request: Request, kind: type[T], limits: Limits) -> T:
    """Read the body as a `kind`; JaxserveError when it is anything else, or too large."""
    given = await read_object(request, limits)
    body = _checked(kind, given)
    note_ignored(request, given, kind.model_fields)
    return body


async def read_object(request: Request, limits: Limits) -> dict[str, Any]:
    """Read the body as a JSON object; JaxserveError when it is anything else, or too large."""
    # A browser sends a cross-site request without asking the server first (CORS preflight) unless
    # its content-type is unusual. JSON is, so other sites' pages cannot post here unnoticed.
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != MEDIA_TYPE:
        raise MediaTypeError(f"the content-type is {given!r:.80}; it must be {MEDIA_TYPE}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise MediaTypeError(
            f"the content-encoding is {encoding!r:.80}; send the body as it is, without the header"
        )
    return _object(await _bytes(request, limits))


async def _bytes(request: Request, limits: Limits) -> bytes:
    # The header refuses a large body before it is read; the count also holds without the header.
    announced = request.headers.get("content-length", "0").lstrip("0")
    _check_size(int(announced or 0), limits)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        _check_size(size, limits)
        parts.append(part)
    return b"".join(parts)


def _check_size(size: int, limits: Limits) -> None:
    limit = limits.max_body_bytes
    if size > limit:
        raise BodyTooLargeError(
            f"the body has at least {size} bytes; the limit is {limit} (--max-body-bytes)"
        )


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = loads(data)
    except ValueError as error:
        raise BodyError(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise BodyError(f"the body is a JSON {type(found).__name__}; it must be an object")
    return found


def _checked[T: Body](kind: type[T], given: dict[str, Any]) -> T:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise request_error(error) from None


def request_error(error: ValidationError, inside: str = "") -> RequestError:
    """Return the first of pydantic's errors as a RequestError with the field's path.

    Args:
        inside: Path of the object that was checked.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    path = _path(first["loc"])
    path = ".".join(part for part in (inside, path) if part)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause.under(path) if path else cause
    if first["type"] == "missing":
        return RequestError(path, "is missing")
    if cause:
        return RequestError(path, str(cause))
    message = first["msg"].removeprefix("Input should ")
    if message == first["msg"]:
        return RequestError(path, f"cannot be used: {message}")
    return RequestError(path, f"must {message}")


def _path(parts: tuple[int | str, ...]) -> str:
    """Render a location such as ("messages", 2, "role") as "messages[2].role"."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
