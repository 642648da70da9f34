"""Gate: whether calls may come in, and what is behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from jaxserve.errors import DrainingError, LoadingError, RestartingError
from jaxserve.server.serving_state import Served


class Phase(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass
class Gate:
    """loading -> ready -> draining; failed from any of them. changed: told of each new phase."""

    changed: Callable[[Phase], None] = lambda phase: None
    phase: Phase = Phase.LOADING
    served: Served | None = None

    def enter(self) -> Served:
        """What is served, for a new request; UnavailableError unless ready."""
        if self.phase is Phase.DRAINING:
            raise DrainingError(
                "the server is about to end and takes no new requests (try another one)"
            )
        return self.look()

    def look(self) -> Served:
        """The same for questions that a draining server still answers."""
        if self.phase is Phase.FAILED:
            raise RestartingError("the engine has failed; the server restarts")
        if self.served is None:
            raise LoadingError("the model is being loaded and its steps compiled (try again soon)")
        return self.served

    def open(self, served: Served) -> None:
        self.served = served
        self._turn(Phase.READY)

    def drain(self) -> None:
        if self.phase in (Phase.LOADING, Phase.READY):
            self._turn(Phase.DRAINING)

    def fail(self) -> None:
        self._turn(Phase.FAILED)

    def _turn(self, phase: Phase) -> None:
        self.phase = phase
        self.changed(phase)
