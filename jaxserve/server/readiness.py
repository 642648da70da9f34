"""Readiness of a server: its phase, and its serving state once the model is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from jaxserve.errors import DrainingError, LoadingError, RestartingError
from jaxserve.server.serving_state import ServingState


class Phase(StrEnum):
    """Phases of a server's life; the values are what clients read."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"
    FAILED = "failed"


@dataclass
class Readiness:
    """Says whether new requests may come in, and holds what serves them.

    Phases follow one another: loading, ready, draining, ended; failed may follow any of them.
    """

    on_phase: Callable[[Phase], None] = lambda phase: None  # called with each new phase
    phase: Phase = Phase.LOADING
    state: ServingState | None = None

    @property
    def is_ending(self) -> bool:
        """Return whether clients should take their next request to another server."""
        return self.phase in (Phase.DRAINING, Phase.ENDED, Phase.FAILED)

    def require_ready(self) -> ServingState:
        """Return what computes a decode server's prompt; UnavailableError unless ready."""
        if self.phase is Phase.DRAINING:
            raise _draining()
        return self.require_serving()

    def require_serving(self) -> ServingState:
        """Return what serves a new request, also one that comes while the server drains.

        Such a request was sent before its client could hear of the drain. Raises UnavailableError
        while the model is loading, when the time of the drain is over, and after a failure.
        """
        if self.phase is Phase.ENDED or (self.phase is Phase.DRAINING and self.state is None):
            raise _draining()
        return self.require_loaded()

    def require_loaded(self) -> ServingState:
        """Return what answers questions about the server, which it does until it is gone.

        Raises UnavailableError while the model is loading, and after a failure.
        """
        if self.phase is Phase.FAILED:
            raise RestartingError("the engine has failed; the server restarts")
        if self.state is None:
            raise LoadingError("the model is being loaded and its steps compiled (try again soon)")
        return self.state

    def set_ready(self, state: ServingState) -> None:
        """Begin to take requests."""
        self.state = state
        self._set(Phase.READY)

    def set_draining(self) -> None:
        """Send clients elsewhere from now on; without effect after a failure."""
        if self.phase in (Phase.LOADING, Phase.READY):
            self._set(Phase.DRAINING)

    def set_ended(self) -> None:
        """Refuse new requests, since the time of the drain is over; not after a failure."""
        if self.phase is Phase.DRAINING:
            self._set(Phase.ENDED)

    def set_failed(self) -> None:
        """Refuse everything from now on."""
        self._set(Phase.FAILED)

    def _set(self, phase: Phase) -> None:
        self.phase = phase
        self.on_phase(phase)


def _draining() -> DrainingError:
    return DrainingError("the server is about to end and takes no new requests (try another one)")
