"""Statuses of gRPC for errors, with google.rpc details."""

import math

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from google.rpc.status_pb2 import Status

from jaxserve.errors import JaxserveError, RequestError

DOMAIN = "jaxserve"


def status_of(error: JaxserveError) -> Status:
    """Return the error's status with one ErrorInfo, and with BadRequest and RetryInfo if any."""
    entries: list[Message] = [details.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if isinstance(error, RequestError):
        violation = details.BadRequest.FieldViolation(field=error.field, description=error.problem)
        entries.append(details.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = Duration()
        delay.FromMilliseconds(pushback_ms(error.retry_after))
        entries.append(details.RetryInfo(retry_delay=delay))
    code = grpc.StatusCode[error.code].value[0]
    return Status(code=code, message=str(error), details=[_packed(entry) for entry in entries])


def trailers(error: JaxserveError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata of a call that ends with this error."""
    # A negative number keeps retry policies of clients from sending the call again.
    pushback = -1 if error.retry_after is None else pushback_ms(error.retry_after)
    return (
        ("grpc-status-details-bin", status_of(error).SerializeToString()),
        ("grpc-retry-pushback-ms", str(pushback)),
    )


def pushback_ms(seconds: float) -> int:
    """Return whole milliseconds, rounded up."""
    return math.ceil(seconds * 1000)


def _packed(message: Message) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
