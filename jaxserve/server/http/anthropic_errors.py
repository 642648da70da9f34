"""Errors in Anthropic's form: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.errors import (
    ContextLengthError,
    JaxserveError,
    QueueFullError,
    RequestError,
    UnavailableError,
)

PATH = "/v1/messages"
ID_HEADER = "request-id"  # of answers in Anthropic's API
OVERLOADED = 529
THREAD = "thread"  # field of a conversation that the server keeps
# On which Anthropic's SDKs send the whole conversation from then on.
NO_THREADS: Mapping[str, Any] = MappingProxyType(
    {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
)
TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        OVERLOADED: "overloaded_error",
    }
)


def is_of_messages(path: str) -> bool:
    """Return whether a path is one of Anthropic's API."""
    return path == PATH or path.startswith(f"{PATH}/")


def anthropic_status(error: JaxserveError) -> int:
    """Return the HTTP status of an error; 529 says that the server, not the client, is too busy."""
    is_busy = isinstance(error, QueueFullError | UnavailableError)
    return OVERLOADED if is_busy else error.http_status


def anthropic_error_body(error: JaxserveError, request_id: str | None) -> dict[str, Any]:
    """Return the error as a JSON object, for a whole response or for one event of a stream."""
    status = anthropic_status(error)
    default = "invalid_request_error" if status < 500 else "api_error"
    told: dict[str, Any] = {"type": TYPES.get(status, default), "message": _message(error)}
    if isinstance(error, RequestError) and error.field == THREAD:
        told["details"] = dict(NO_THREADS)
    return {"type": "error", "error": told, "request_id": request_id}


def _message(error: JaxserveError) -> str:
    """Return an error's text; that of a prompt that is too long as Claude Code knows it."""
    if isinstance(error, ContextLengthError) and error.tokens:
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum ({error})"
    return str(error)
