"""Errors of gRPC calls whose metadata or messages are not what a call may have."""

from jaxserve.errors import JaxserveError


class MessageTooLargeError(JaxserveError):
    code = "RESOURCE_EXHAUSTED"
    http_status = 413
    reason = "REQUEST_TOO_LARGE"


class MetadataTooLargeError(JaxserveError):
    code = "RESOURCE_EXHAUSTED"
    http_status = 431
    reason = "HEADERS_TOO_LARGE"


class SlowSenderError(JaxserveError):
    code = "DEADLINE_EXCEEDED"
    http_status = 408
    reason = "REQUEST_TIMEOUT"


class MessageError(JaxserveError):
    code = "INVALID_ARGUMENT"
    http_status = 400
    reason = "INVALID_MESSAGE"
