"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}} and retry headers.

Paths of Anthropic's API get errors in its form, see anthropic_errors.

JaxserveError                  and, of HTTP alone:
├── MessageError            400  not HTTP, or a host that is missing
├── BodyError               400  not JSON, not an object
├── UnknownUrlError         404
├── MethodError             405
├── BodyTimeoutError        408
├── BodyTooLargeError       413
├── MediaTypeError          415
├── HostError               421  a name that is not this server's
├── HeadersTooLargeError    431
├── TooManyConnectionsError 503
└── RequestError
    ├── UnknownFieldError   400  a name that this server does not know
    └── UnsupportedError    400  a field of OpenAI's whose value would have to change the output
"""

import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Set
from functools import wraps
from typing import Any

import httptools
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from jaxserve.errors import JaxserveError, RequestError
from jaxserve.server.core.admission import MAX_ID_BYTES
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.server.core.status import pushback_ms
from jaxserve.server.http.anthropic_errors import ID_HEADER as ANTHROPIC_ID_HEADER
from jaxserve.server.http.anthropic_errors import (
    anthropic_error_body,
    anthropic_status,
    is_of_messages,
)
from jaxserve.server.http.json import MEDIA_TYPE, dumps

Endpoint = Callable[[Any, Request], Awaitable[Response]]

CLIENT_GONE = 499  # nginx's status for a client that closed the connection
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {  # OpenAI's names; every other reason is its own code, in lower case
    "INVALID_FIELD": "invalid_value",
    "NO_VALID_TOKEN": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
}


class MessageError(JaxserveError):
    code = "INVALID_ARGUMENT"
    http_status = 400
    reason = "INVALID_REQUEST"


class BodyError(JaxserveError):
    code = "INVALID_ARGUMENT"
    http_status = 400
    reason = "INVALID_BODY"


class UnknownUrlError(JaxserveError):
    code = "UNIMPLEMENTED"
    http_status = 404
    reason = "UNKNOWN_URL"


class MethodError(JaxserveError):
    code = "UNIMPLEMENTED"
    http_status = 405
    reason = "METHOD_NOT_SUPPORTED"


class BodyTimeoutError(JaxserveError):
    code = "DEADLINE_EXCEEDED"
    http_status = 408
    reason = "REQUEST_TIMEOUT"


class BodyTooLargeError(JaxserveError):
    code = "RESOURCE_EXHAUSTED"
    http_status = 413
    reason = "REQUEST_TOO_LARGE"


class MediaTypeError(JaxserveError):
    code = "INVALID_ARGUMENT"
    http_status = 415
    reason = "UNSUPPORTED_MEDIA_TYPE"


class HostError(JaxserveError):
    code = "INVALID_ARGUMENT"
    http_status = 421
    reason = "MISDIRECTED_REQUEST"


class HeadersTooLargeError(JaxserveError):
    code = "RESOURCE_EXHAUSTED"
    http_status = 431
    reason = "HEADERS_TOO_LARGE"


class TooManyConnectionsError(JaxserveError):
    code = "UNAVAILABLE"
    http_status = 503
    reason = "TOO_MANY_CONNECTIONS"
    retry_after = 1.0

    def __init__(self, limit: int):
        super().__init__(f"the server has {limit} connections already (--max-http-connections)")


class UnknownFieldError(RequestError):
    reason = "UNKNOWN_PARAMETER"

    def __init__(self, field: str, problem: str):
        # JSON can write halves of surrogate pairs in names, UTF-8 and so the answer cannot.
        super().__init__(field.encode("utf-8", "backslashreplace").decode(), problem)


class UnsupportedError(RequestError):
    reason = "UNSUPPORTED_PARAMETER"


def check_fields(given: Mapping[str, Any], known: Set[str], path: str, what: str) -> None:
    """Raise UnknownFieldError for a field of `what`, at `path`, that is neither known nor null."""
    for name, value in given.items():
        if name not in known and value is not None:
            raise UnknownFieldError(f"{path}.{name:.80}", f"is not a field of {what}; leave it out")


def error_body(error: JaxserveError) -> dict[str, Any]:
    """Return the error as a JSON object, for a whole response or for one event of a stream."""
    status = error.http_status
    default_type = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": str(error),
            "type": TYPES.get(status, default_type),
            "param": error.field if isinstance(error, RequestError) else None,
            "code": CODES.get(error.reason, error.reason.lower()),
        }
    }


def error_response(error: JaxserveError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the error as a response, with additional headers if given."""
    return ErrorResponse(error, {**_headers(error), **(headers or {})})


class ErrorResponse(Response):
    """An error in the form of the API whose path was asked for."""

    def __init__(self, error: JaxserveError, headers: Mapping[str, str]):
        super().__init__(dumps(error_body(error)), error.http_status, headers, MEDIA_TYPE)
        self._error = error
        self._given = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_of_messages(scope["path"]):
            await self._as_anthropic(scope)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def _as_anthropic(self, scope: Scope) -> Response:
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not 0 < len(request_id) <= MAX_ID_BYTES:
            request_id = f"req_{secrets.token_hex(12)}"
        body = dumps(anthropic_error_body(self._error, request_id))
        headers = {**self._given, ANTHROPIC_ID_HEADER: request_id}
        return Response(body, anthropic_status(self._error), headers, MEDIA_TYPE)


def parser_error(error: httptools.HttpParserError) -> JaxserveError:
    """Return what is wrong with bytes that the parser refuses, or an incident for a bug."""
    cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
    if isinstance(cause, JaxserveError):
        return cause
    if isinstance(cause, httptools.HttpParserError | UnicodeDecodeError):
        return MessageError(f"the request is not valid HTTP/1.1: {cause}")
    return mask_internal_error(cause or error)


def closing_response(error: JaxserveError) -> bytes:
    """Return the error as the bytes of a response that ends its connection."""
    response = error_response(error, {"connection": "close"})
    lines = [b"%s: %s\r\n" % header for header in response.raw_headers]
    return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])


def _headers(error: JaxserveError) -> dict[str, str]:
    # OpenAI's clients retry after any 408, 409, 429 and 5xx unless x-should-retry is "false".
    headers = {"x-should-retry": "false" if error.retry_after is None else "true"}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(pushback_ms(error.retry_after))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def errors_to_responses(endpoint: Endpoint) -> Endpoint:
    """Make the endpoint answer with an error response instead of raising.

    Cancellation is not an Exception and passes through.
    """

    @wraps(endpoint)
    async def answered(self: Any, request: Request) -> Response:
        try:
            return await endpoint(self, request)
        except ClientDisconnect:
            # The connection is closed, so this response is never read.
            return Response(status_code=CLIENT_GONE)
        except RecursionError:
            return error_response(BodyError("the body is nested too deeply"))
        except Exception as error:
            return error_response(mask_internal_error(error))

    return answered


async def refuse_route(request: Request, problem: Exception) -> Response:
    """Return the response for a path or a method that starlette's router refuses."""
    assert isinstance(problem, HTTPException)
    route = f"{request.method} {request.url.path:.200}"
    if problem.status_code == 405:
        allowed = (problem.headers or {}).get("Allow", "")
        error = MethodError(f"{route}: this path does not support the method; use {allowed}")
        return error_response(error, problem.headers)
    return error_response(UnknownUrlError(f"{route}: no such path exists"))
