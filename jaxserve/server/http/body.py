"""From a request's bytes to a checked body."""

import asyncio
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.errors import (
    BodyError,
    BodyTimeoutError,
    BodyTooLargeError,
    MediaTypeError,
)
from jaxserve.server.http.json import loads
from jaxserve.server.http.types import Body

MEDIA_TYPE = "application/json"


async def read[T: Body](request: Request, kind: type[T], limits: Limits) -> T:
    """The body as a `kind`; JaxserveError for whatever else it is."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if (
        given != MEDIA_TYPE
    ):  # what a web page of somebody else's could send unasked is not JSON by name
        raise MediaTypeError(f"the content-type is {given!r:.80}; it must be {MEDIA_TYPE}")
    try:
        async with asyncio.timeout(limits.slow_client_seconds):
            data = await _bytes(request, limits)
    except TimeoutError:
        seconds = limits.slow_client_seconds
        raise BodyTimeoutError(
            f"the body did not come within {seconds:g} s (--slow-client-seconds)"
        ) from None
    return _checked(kind, _object(data))


async def _bytes(request: Request, limits: Limits) -> bytes:
    parts, size = [], int(request.headers.get("content-length", 0))
    _check_size(size, limits)
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
            f"the body has {size} bytes or more; the limit is {limit} (--max-body-bytes)"
        )


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = loads(data)
    except ValueError as error:
        raise BodyError(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise BodyError(f"the body is a JSON {type(found).__name__}; give an object")
    return found


def _checked[T: Body](kind: type[T], given: dict[str, Any]) -> T:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _request_error(error) from None


def _request_error(error: ValidationError) -> RequestError:
    """The first of pydantic's errors, with the field's path."""
    first = error.errors(include_url=False, include_input=False)[0]
    path, cause = _path(first["loc"]), first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause.under(path) if path else cause
    if first["type"] == "missing":
        return RequestError(path, "is missing")
    return RequestError(path, str(cause) if cause else first["msg"].replace("Input", "it", 1))


def _path(parts: tuple[int | str, ...]) -> str:
    """(messages, 2, role) as messages[2].role."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(
        "."
    )
