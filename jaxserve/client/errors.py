"""Errors of jaxserve.errors, made again from the status of a failed call."""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2 as details
from google.rpc.status_pb2 import Status

from jaxserve import errors
from jaxserve.errors import JaxserveError, RequestError

DOMAIN = "jaxserve"


class CallError(JaxserveError):
    """A call that failed without an answer of jaxserve.

    There was no connection, the deadline passed, the call was cancelled, or a proxy refused it.

    Attributes:
        code: Status code of gRPC, such as "UNAVAILABLE".
        details: Text of the status.
    """

    reason = "CALL_FAILED"

    def __init__(self, code: str, details: str):
        super().__init__(f"{code}: {' '.join(details.split())}")
        self.code = code
        self.details = details


def _by_reason() -> Mapping[str, type[JaxserveError]]:
    """Return the classes of jaxserve.errors; of those with one reason, the most derived."""
    found: dict[str, type[JaxserveError]] = {}
    queue = deque([JaxserveError])
    while queue:
        kind = queue.popleft()
        if kind.__module__ == errors.__name__:
            found[kind.reason] = kind
            queue += kind.__subclasses__()
    return MappingProxyType(found)


BY_REASON = _by_reason()


def error_of(failure: Any) -> JaxserveError:
    """Return the error that the server raised, or CallError where it raised none.

    Args:
        failure: RpcError of a call that has ended, of grpc or of grpc.aio.
    """
    text = failure.details() or ""
    parts = _parts(failure)
    info = parts.get(details.ErrorInfo)
    kind = BY_REASON.get(info.reason) if info and info.domain == DOMAIN else None
    if kind is None:
        return CallError(failure.code().name, text)
    # The constructors compose the text, which the server has done already.
    error = kind.__new__(kind, text)
    if isinstance(error, RequestError):
        error.field, error.problem = _violation(parts.get(details.BadRequest), text)
    if delay := parts.get(details.RetryInfo):
        error.retry_after = delay.retry_delay.ToTimedelta().total_seconds()
    return error


def trailers_of(failure: Any) -> dict[str, Any]:
    """Return the trailing metadata; empty if the call never reached a server."""
    return dict(failure.trailing_metadata() or ())


def _violation(bad: Any, text: str) -> tuple[str, str]:
    """Return the field that is wrong, and the problem with it."""
    if bad and bad.field_violations:
        return bad.field_violations[0].field, bad.field_violations[0].description
    return "request", text


def _parts(failure: grpc.RpcError) -> dict[type[Message], Any]:
    """Return the details of the status that are understood here, by their class."""
    found: dict[type[Message], Any] = {}
    try:
        status = Status.FromString(trailers_of(failure).get("grpc-status-details-bin", b""))
        for part in status.details:
            for message in (details.ErrorInfo(), details.BadRequest(), details.RetryInfo()):
                if part.Unpack(message):
                    found[type(message)] = message
    except DecodeError:  # a proxy may put something else there
        return {}
    return found
