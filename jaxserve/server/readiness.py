"""Gate: whether calls may come in, and what is behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from jaxserve.errors import DrainingError, LoadingError, RestartingError
from jaxserve.server.serving_state import ServingState


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass
class Readiness:
    """loading -> ready -> draining; failed from any of them. changed: told of each new phase."""

    on_phase: Callable[[Phase], None] = lambda phase: None
    phase: Phase = Phase.LOADING
    state: ServingState | None = None

    def require_ready(self) -> ServingState:
        """What is served, for a new request; UnavailableError unless ready."""
        if self.phase is Phase.DRAINING:
            raise DrainingError(
                "the server is about to end and takes no new requests (try another one)"
            )
        return self.require_loaded()

    def require_loaded(self) -> ServingState:
        """The same for questions that a draining server still answers."""
        if self.phase is Phase.FAILED:
            raise RestartingError("the engine has failed; the server restarts")
        if self.state is None:
            raise LoadingError("the model is being loaded and its steps compiled (try again soon)")
        return self.state

    def set_ready(self, state: ServingState) -> None:
        self.state = state
        self._turn(Phase.READY)

    def set_draining(self) -> None:
        if self.phase in (Phase.LOADING, Phase.READY):
            self._turn(Phase.DRAINING)

    def set_failed(self) -> None:
        self._turn(Phase.FAILED)

    def _turn(self, phase: Phase) -> None:
        self.phase = phase
        self.on_phase(phase)
