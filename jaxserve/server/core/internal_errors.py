"""Errors that are not meant for clients, as clients are told of them.

A bug becomes an incident id, under which the log has the traceback.
"""

import errno
import logging
import secrets
from typing import TypeGuard

from jaxserve.errors import EngineError, ExhaustedError, JaxserveError, NonFiniteLogitsError

# Of files, of sockets, of memory, of processes.
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN)
log = logging.getLogger(__name__)


class IncidentError(EngineError):
    """A bug that was logged already; the message holds nothing but the incident id."""


def mask_internal_error(error: BaseException) -> JaxserveError:
    """Return the error if it is meant for clients, else a generic one with an incident id.

    Messages of other exceptions may hold paths or prompts, and are only written to the log.
    """
    if _is_for_clients(error):
        return error
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in EXHAUSTED:
        log.warning("a request is refused: %s", str(error) or "out of memory")
        return ExhaustedError("the server is out of memory, files or processes")
    incident = secrets.token_hex(6)
    log.error("incident %s", incident, exc_info=error)
    return IncidentError(f"internal error (incident {incident})")


def _is_for_clients(error: BaseException) -> TypeGuard[JaxserveError]:
    # EngineError is raised for broken invariants, whose texts speak of the inside of the engine;
    # two kinds of it say something that a client can use.
    if isinstance(error, EngineError):
        return isinstance(error, NonFiniteLogitsError | IncidentError)
    return isinstance(error, JaxserveError)
