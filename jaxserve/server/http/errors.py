"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}, and when
to try again.

JaxserveError                  and, of HTTP alone:
├── BodyError               400  not JSON, not an object, a header that says nothing
├── UnknownUrlError         404
├── MethodError             405
├── BodyTimeoutError        408
├── BodyTooLargeError       413
├── MediaTypeError          415
├── HeadersTooLargeError    431
└── RequestError
    ├── UnknownFieldError   400  a name that this server does not know
    └── UnsupportedError    400  a field of OpenAI's whose value would have to change the output
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxserve.errors import JaxserveError, RequestError
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.server.core.status import pushback_ms
from jaxserve.server.http.json import dumps

Endpoint = Callable[[Any, Request], Awaitable[Response]]

CLIENT_GONE = 499
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {  # OpenAI's names; the others are the reasons in small letters
    "INVALID_FIELD": "invalid_value",
    "NO_VALID_TOKEN": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
}


class BodyError(JaxserveError):
    code, http_status, reason = "INVALID_ARGUMENT", 400, "INVALID_BODY"


class UnknownUrlError(JaxserveError):
    code, http_status, reason = "UNIMPLEMENTED", 404, "UNKNOWN_URL"


class MethodError(JaxserveError):
    code, http_status, reason = "UNIMPLEMENTED", 405, "METHOD_NOT_SUPPORTED"


class BodyTimeoutError(JaxserveError):
    code, http_status, reason = "DEADLINE_EXCEEDED", 408, "REQUEST_TIMEOUT"


class BodyTooLargeError(JaxserveError):
    code, http_status, reason = "RESOURCE_EXHAUSTED", 413, "REQUEST_TOO_LARGE"


class MediaTypeError(JaxserveError):
    code, http_status, reason = "INVALID_ARGUMENT", 415, "UNSUPPORTED_MEDIA_TYPE"


class HeadersTooLargeError(JaxserveError):
    code, http_status, reason = "RESOURCE_EXHAUSTED", 431, "HEADERS_TOO_LARGE"


class UnknownFieldError(RequestError):
    reason = "UNKNOWN_PARAMETER"


class UnsupportedError(RequestError):
    reason = "UNSUPPORTED_PARAMETER"


def error_body(error: JaxserveError) -> dict[str, Any]:
    """The error as a JSON object: the whole of a response, or an event of a stream."""
    status = error.http_status
    return {
        "error": {
            "message": str(error),
            "type": TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
            "param": error.field if isinstance(error, RequestError) else None,
            "code": CODES.get(error.reason, error.reason.lower()),
        }
    }


def refusal(error: JaxserveError, headers: Mapping[str, str] | None = None) -> Response:
    """The error as a response."""
    return Response(
        dumps(error_body(error)),
        error.http_status,
        {**_headers(error), **(headers or {})},
        "application/json",
    )


def _headers(error: JaxserveError) -> dict[str, str]:
    """OpenAI's clients try again after any 408, 409, 429 and 5xx, unless x-should-retry says that
    it is no use.
    """
    headers = {"x-should-retry": "false" if error.retry_after is None else "true"}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(pushback_ms(error.retry_after))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def answering(endpoint: Endpoint) -> Endpoint:
    """Turn errors into responses. Cancellation passes through."""

    @wraps(endpoint)
    async def answered(self: Any, request: Request) -> Response:
        try:
            return await endpoint(self, request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)  # nobody reads it
        except RecursionError:
            return refusal(BodyError("the body is nested too deeply"))
        except Exception as error:
            return refusal(mask_internal_error(error))

    return answered


async def refuse_route(request: Request, problem: Exception) -> Response:
    """For what the router itself refuses."""
    assert isinstance(problem, HTTPException)
    asked = f"{request.method} {request.url.path:.200}"
    if problem.status_code == 405:
        allowed = (problem.headers or {}).get("Allow", "")
        return refusal(
            MethodError(f"{asked}: the method is not allowed here; use {allowed}"), problem.headers
        )
    return refusal(UnknownUrlError(f"{asked}: there is nothing at this path"))
