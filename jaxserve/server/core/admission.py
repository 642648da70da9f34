"""Admission of requests: bounds on their fields, room among waiting requests, deadlines."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxserve.errors import DeadlineError, JaxserveError, QueueFullError, RequestError, RoleError
from jaxserve.server.core.client_rules import ANY_PRIORITY, ClientRules
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.load_model import LoadModel
from jaxserve.server.core.page_fetches import PageFetches
from jaxserve.server.core.place_forecast import LATE
from jaxserve.server.core.prompt_encoder import utf8_size
from jaxserve.server.core.queue_bounds import QueueBounds
from jaxserve.server.core.wait_forecast import Work

MAX_ID_BYTES = 128
MAX_SALT_BYTES = 128
WORK_SECONDS = 0.05  # for which the work ahead is taken to be the same
PROBE_SECONDS = 1.0  # between two requests that are admitted to find out whether they are late


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
        running: Function that returns the work of the choices that run at present.
    """

    def __init__(
        self,
        limits: Limits,
        rules: ClientRules,
        load: LoadModel,
        page_fetches: PageFetches,
        prefill_only: bool,
        running: Callable[[], Work],
    ):
        self._limits = limits
        self._rules = rules
        self._load = load
        self._bounds = QueueBounds(limits, load.queue, page_fetches)
        self._prefill_only = prefill_only
        self._running = running
        self._work = Work(())
        self._work_at = -math.inf
        self._probed_at = -math.inf

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all requests that wait in the engine for their first token."""
        return self._load.queue.all.prompt_tokens

    @property
    def queue_seconds(self) -> float:
        """Seconds that a request behind all others would wait for its row."""
        ahead = self._load.queue.all
        work = self._work_ahead()
        return self._load.waits.seconds_to_start(ahead.choices + 1, ahead.prompt_tokens, work)

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
        if incoming.deadline is None:
            return None
        now = self._load.clock()
        if incoming.deadline <= now:
            raise DeadlineError("the deadline has passed")
        latest = self._latest_start(tokens, incoming, incoming.deadline - now)
        return None if latest is None else now + latest

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

    def _latest_start(self, tokens: int, incoming: IncomingRequest, left: float) -> float | None:
        """Return the seconds within which a request has to begin that has `left` seconds.

        None where nothing else runs or waits: what is known of the pace is of the past then, and
        only a request that is admitted can show that it does not hold any more.

        Raises QueueFullError or DeadlineError if the answer would take longer.
        """
        choices = incoming.params.n
        ahead = self._load.queue.ahead(incoming.priority, incoming.client, choices)
        work = self._work_ahead(incoming)
        if not (work.seconds_left or work.beginning or ahead.choices):
            return None
        pace = self._load.pace
        expected = self._expected_tokens(tokens, incoming)
        rounds = self._load.rounds(incoming.client, choices, work)
        own = pace.prompt_seconds(tokens) + rounds * expected * pace.seconds_per_token
        wait = self._load.waits.seconds_to_start(ahead.choices + choices, ahead.prompt_tokens, work)
        if own > left or LATE * wait + own > left:
            if not wait and self._may_probe():
                return None
            raise self._too_late(tokens, incoming, left, own, wait)
        if not wait:
            return left - own
        # Where all answers began at the last moment, each that takes longer than expected would be
        # computed for nothing. One that begins as expected is given its row in any case.
        to_spare = min((LATE - 1) * own, (left - own - wait) / 2)
        return left - own - to_spare

    def _too_late(
        self, tokens: int, incoming: IncomingRequest, left: float, own: float, wait: float
    ) -> JaxserveError:
        """Return the error for a request whose answer would come after its deadline.

        Args:
            left: Seconds until the deadline.
            own: Seconds that the answer takes from its first chunk on.
            wait: Seconds until then.
        """
        shortest = self._load.lengths.shortest(self._expected_tokens(tokens, incoming))
        fastest = self._load.pace.least_seconds(tokens, shortest)
        if fastest > left:
            return DeadlineError(
                f"{tokens} prompt tokens and an answer of {shortest:.0f} take {fastest:.2f} s at "
                f"the best pace so far, the deadline leaves {left:.2f} s"
            )
        # Requests that have to leave the queue before one like this is admitted.
        longest = max(0.0, left - own) / LATE
        places = math.ceil(len(self._load.queue) * (1 - longest / wait)) if wait else 1
        return QueueFullError(
            f"the answer could take {LATE * wait + own:.2f} s, {LATE * wait:.2f} s of them in the "
            f"queue, and the deadline leaves {left:.2f} s",
            self._places_in(incoming, places),
        )

    def _may_probe(self) -> bool:
        """Return whether a request is admitted that nobody has to wait for and that looks too late.

        One is every PROBE_SECONDS: what is known of lengths and prompts may not hold for requests
        of its kind, and only one that is admitted can show it.
        """
        now = self._load.clock()
        if now - self._probed_at < PROBE_SECONDS:
            return False
        self._probed_at = now
        return True

    def _expected_tokens(self, tokens: int, incoming: IncomingRequest) -> float:
        """Return the expected length of an answer; 0 if nothing is known of answers yet."""
        if incoming.embed or incoming.prefill or not self._load.lengths.known:
            return 0.0
        return self._load.lengths.expected(
            incoming.params.max_tokens or self._load.max_context - tokens
        )

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
            f"{problem} (the queue is {self.queue_seconds:.1f} s long)",
            self._places_in(incoming, places),
        )

    def _places_in(self, incoming: IncomingRequest, places: int) -> float:
        """Return the seconds after which a refused client is to come back."""
        return self._load.places.come_back_in(self._work_ahead(incoming), max(1, places))

    def _work_ahead(self, incoming: IncomingRequest | None = None) -> Work:
        """Return what is ahead of a request; prompts in the queue are taken to be alike.

        What runs is counted anew only every WORK_SECONDS.
        """
        now = self._load.clock()
        if now - self._work_at > WORK_SECONDS:
            self._work = self._running()
            self._work_at = now
        if incoming:
            work = self._load.work_before(
                incoming.client, incoming.priority, incoming.params.n, self._work
            )
        else:
            work = replace(self._work, unbegun=sum(self._work.unbegun_of.values()))
        if mean := self._load.queue.mean():
            return replace(
                work,
                choices=mean.choices,
                prompt_tokens=mean.tokens,
                max_tokens=mean.max_tokens,
            )
        if incoming is None:
            return replace(work, max_tokens=self._load.max_context)
        # None of those that wait is tokenized: they are taken to be like this request.
        params = incoming.params
        most = params.max_tokens or self._load.max_context
        return replace(work, choices=params.n, max_tokens=most)


def _check_size(name: str, text: str, limit: int) -> None:
    size = utf8_size(text)
    if size > limit:
        raise RequestError(name, f"has {size} bytes; the limit is {limit}")
