"""From the status of a failed call to the error that the server meant."""

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
    """A call failed without a word of jaxserve: no connection, a passed deadline, a cancellation,
    somebody's proxy.

    code: gRPC's, such as "UNAVAILABLE". details: its text.
    """

    reason = "CALL_FAILED"

    def __init__(self, code: str, details: str):
        super().__init__(f"{code}: {' '.join(details.split())}")
        self.code, self.details = code, details


def _by_reason() -> Mapping[str, type[JaxserveError]]:
    """The classes of jaxserve.errors; of those that share a reason, the one that says most."""
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
    """failure: a grpc.RpcError of a call that has ended, of grpc or of grpc.aio."""
    text = failure.details() or ""
    parts = _parts(failure)
    info = parts.get(details.ErrorInfo)
    kind = BY_REASON.get(info.reason) if info and info.domain == DOMAIN else None
    if kind is None:
        return CallError(failure.code().name, text)
    # Not by its constructor: that writes the text, which the server has written already.
    error = kind.__new__(kind, text)
    if isinstance(error, RequestError):
        error.field, error.problem = _violation(parts.get(details.BadRequest), text)
    if delay := parts.get(details.RetryInfo):
        error.retry_after = delay.retry_delay.ToTimedelta().total_seconds()
    return error


def trailers_of(failure: Any) -> dict[str, Any]:
    """Trailing metadata; none when the call never reached a server."""
    return dict(failure.trailing_metadata() or ())


def _violation(bad: Any, text: str) -> tuple[str, str]:
    """Field and problem."""
    if bad and bad.field_violations:
        return bad.field_violations[0].field, bad.field_violations[0].description
    return "request", text


def _parts(failure: grpc.RpcError) -> dict[type[Message], Any]:
    """The details of the status that are understood here, by their kind."""
    found: dict[type[Message], Any] = {}
    try:
        for part in Status.FromString(
            trailers_of(failure).get("grpc-status-details-bin", b"")
        ).details:
            for message in (details.ErrorInfo(), details.BadRequest(), details.RetryInfo()):
                if part.Unpack(message):
                    found[type(message)] = message
    except DecodeError:  # of somebody else
        return {}
    return found
