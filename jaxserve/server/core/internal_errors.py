"""Bugs, as clients may see them: no more than an id, which is in the log with the traceback."""

import logging
import secrets

from jaxserve.errors import EngineError, JaxserveError, NonFiniteLogitsError

log = logging.getLogger(__name__)


def mask_internal_error(error: BaseException) -> JaxserveError:
    """The error itself if it was meant for clients, else a generic one; paths and prompts stay
    here.
    """
    if isinstance(error, JaxserveError) and (not isinstance(error, EngineError) or _is_told(error)):
        return error
    incident = secrets.token_hex(6)
    log.error("incident %s", incident, exc_info=error)
    return IncidentError(f"internal error (incident {incident})")


def _is_told(error: EngineError) -> bool:
    return isinstance(error, NonFiniteLogitsError | IncidentError)


class IncidentError(EngineError):
    """A bug that was logged already."""
