"""The interface of metrics, logs and traces to the service."""

from typing import Protocol

from jaxserve.engine.engine_thread import StepReport
from jaxserve.errors import JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.incoming_request import IncomingRequest


class RequestObserver(Protocol):
    """Metrics, logs and traces: told of each step and of each request's end.

    All methods are called on the event loop and must not block.
    """

    def refused(self, incoming: IncomingRequest, error: JaxserveError) -> None:
        """Take note of a request that was not admitted."""
        ...

    def stepped(self, report: StepReport) -> None:
        """Take note of a step of the engine."""
        ...

    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None:
        """Take note of new tokens of a choice.

        Args:
            first: Whether the tokens are the choice's first.
            seconds: Seconds since the choice's previous tokens, or since submission.
        """
        ...

    def ended(self, answer: Answer, error: JaxserveError | None) -> None:
        """Take note of the end of an admitted request; `error` is None unless it failed."""
        ...
