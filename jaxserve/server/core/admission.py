"""Admission of requests: bounds on their fields, and room among waiting requests."""

import math
from dataclasses import dataclass

from jaxserve.errors import QueueFullError, RequestError, RoleError
from jaxserve.server.core.client_rules import ANY_PRIORITY, ClientRules
from jaxserve.server.core.deadline_check import DeadlineCheck
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.load_model import LoadModel
from jaxserve.server.core.page_fetches import PageFetches
from jaxserve.server.core.prompt_encoder import utf8_size
from jaxserve.server.core.queue_bounds import QueueBounds

MAX_ID_BYTES = 128
MAX_SALT_BYTES = 128


@dataclass(frozen=True)
class Displaced:
    """A request that has to leave the queue for another one, and the error that it ends with."""

    id: str
    error: QueueFullError


class AdmissionControl:
    """Decides whether a request may enter. Lives on the event loop.

    Args:
        load: Queue and forecasts of the engine.
        prefill_only: Whether only decode servers may ask, not clients.
    """

    def __init__(
        self,
        limits: Limits,
        rules: ClientRules,
        load: LoadModel,
        deadlines: DeadlineCheck,
        page_fetches: PageFetches,
        prefill_only: bool,
    ):
        self._limits = limits
        self._rules = rules
        self._load = load
        self._deadlines = deadlines
        self._bounds = QueueBounds(limits, load.queue, page_fetches)
        self._prefill_only = prefill_only

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all requests that wait in the engine for their first token."""
        return self._load.queue.all.prompt_tokens

    # ---- checks, in the order in which a request meets them

    def check_role(self, incoming: IncomingRequest) -> None:
        """RoleError for a client's request to a prefill server."""
        if self._prefill_only and not incoming.prefill:
            raise RoleError(
                "this server computes prompts for decode servers only (--role prefill); "
                "send the request to a server that decodes"
            )

    def check_fields(self, incoming: IncomingRequest, request_id: str) -> None:
        """RequestError for a field that is out of its bounds."""
        _check_size("request_id", request_id, MAX_ID_BYTES)
        _check_size("cache_salt", incoming.cache_salt, MAX_SALT_BYTES)
        # Decode servers pass on what they let their own clients ask for.
        allowed = ANY_PRIORITY if incoming.prefill else self._rules.client_priorities
        if incoming.priority not in allowed:
            raise RequestError(
                "priority",
                f"is {incoming.priority}; clients may ask for {allowed.first} to {allowed.last} "
                "(--client-priorities)",
            )

    def check_queue(self, incoming: IncomingRequest) -> bool:
        """Return whether a request needs the place of another one, as the queue is full.

        Raises QueueFullError where none would be given up.
        """
        if self._bounds.is_full and not self._bounds.may_enter(incoming):
            raise self._queue_full(self._bounds.requests_problem, incoming)
        return self._bounds.is_full

    def check_room(
        self, tokens: int, incoming: IncomingRequest, needs_place: bool = False
    ) -> float | None:
        """Check that a prompt of `tokens` tokens fits the queue, and its answer its deadline.

        Args:
            needs_place: What `check_queue` has returned.

        Returns:
            Time on the clock until which the request has to begin; None: at any time.

        Raises:
            QueueFullError: The request would have to wait too long.
            DeadlineError: The deadline could not be met if nothing else ran.
        """
        if self._bounds.displaced_by(tokens, incoming, needs_place) is None:
            missing = self._bounds.tokens_over(tokens)
            if missing <= 0:
                raise self._queue_full(self._bounds.requests_problem, incoming)
            places = self._places_of(missing, tokens)
            raise self._queue_full(self._bounds.tokens_problem(tokens), incoming, places)
        return self._deadlines.latest_start(tokens, incoming)

    def displaced_by(
        self, tokens: int, incoming: IncomingRequest, needs_place: bool
    ) -> list[Displaced]:
        """Return the requests that leave the queue for one that `check_room` let pass."""
        ids = self._bounds.displaced_by(tokens, incoming, needs_place) or []
        problem = (
            "the queue is full, and a place was given to a client that has less in it "
            "(--max-waiting-requests, --max-waiting-tokens)"
        )
        return [Displaced(id, self._queue_full(problem, incoming)) for id in ids]

    # ---- refusals

    def _places_of(self, missing_tokens: int, tokens: int) -> int:
        """Return how many requests have to leave the queue to take this many tokens with them."""
        mean = self._load.queue.mean()
        return math.ceil(missing_tokens / (mean.tokens if mean else tokens))

    def _queue_full(
        self, problem: str, incoming: IncomingRequest, places: int = 1
    ) -> QueueFullError:
        """Return the error for a request that finds the queue full.

        Args:
            places: Number of requests that have to leave the queue first.
        """
        return QueueFullError(
            f"{problem} (the queue is {self._deadlines.queue_seconds:.1f} s long)",
            self._deadlines.come_back_in(incoming, places),
        )


def _check_size(name: str, text: str, limit: int) -> None:
    size = utf8_size(text)
    if size > limit:
        raise RequestError(name, f"has {size} bytes; the limit is {limit}")
