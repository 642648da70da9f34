"""Deadlines of requests: forecasts of answers, and refusals of those that would come too late."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxserve.errors import DeadlineError, JaxserveError, QueueFullError
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.load_model import LoadModel
from jaxserve.server.core.place_forecast import LATE
from jaxserve.server.core.wait_forecast import Running, Work

RUNNING_SECONDS = 0.05  # for which what runs is taken to be the same
PROBE_SECONDS = 1.0  # between two requests that are admitted to find out whether they are late


@dataclass(frozen=True)
class Outlook:
    """Forecast of an answer: when it would begin, and how long it would take.

    Attributes:
        wait: Seconds until its first chunk is computed.
        own: Seconds that the answer takes from then on; nine of ten take no longer, if it waits for
            a row.
        work: Work ahead of it.
    """

    wait: float
    own: float
    work: Work

    def is_late(self, left: float) -> bool:
        """Return whether the answer would come after a deadline that is `left` seconds away."""
        return self.own > left or LATE * self.wait + self.own > left


class DeadlineCheck:
    """Tells whether answers can meet their deadlines. Lives on the event loop.

    Args:
        load: Queue and forecasts of the engine.
        running: Function that returns the choices that run at present.
    """

    def __init__(self, load: LoadModel, running: Callable[[], Running]):
        self._load = load
        self._count_running = running
        self._running = Running(())
        self._running_at = -math.inf
        self._probed_at = -math.inf

    @property
    def queue_seconds(self) -> float:
        """Seconds that a request behind all others would wait for its row."""
        ahead = self._load.queue.all
        work = self._work_ahead()
        return self._load.waits.seconds_to_start(ahead.choices + 1, ahead.prompt_tokens, work)

    def latest_start(self, tokens: int, incoming: IncomingRequest) -> float | None:
        """Return the time on the clock until which a request has to begin; None: at any time.

        Args:
            tokens: Number of the prompt's tokens.

        Raises:
            QueueFullError: The request would have to wait too long.
            DeadlineError: The deadline could not be met if nothing else ran.
        """
        if incoming.deadline is None:
            return None
        now = self._load.clock()
        if incoming.deadline <= now:
            raise DeadlineError("the deadline has passed")
        latest = self._latest_start(tokens, incoming, incoming.deadline - now)
        return None if latest is None else now + latest

    def come_back_in(self, incoming: IncomingRequest, places: int) -> float:
        """Return the seconds after which a refused client is to come back.

        Args:
            places: Number of requests that have to leave the queue first.
        """
        return self._places_in(self._work_ahead(incoming), places)

    def _latest_start(self, tokens: int, incoming: IncomingRequest, left: float) -> float | None:
        """Return the seconds within which a request has to begin that has `left` seconds.

        None where nothing else runs or waits.

        Raises QueueFullError or DeadlineError if the answer would take longer.
        """
        outlook = self._outlook(tokens, incoming)
        if outlook is None:
            return None
        wait = outlook.wait
        own = outlook.own
        if outlook.is_late(left):
            if not wait and self._may_probe():
                return None
            raise self._too_late(tokens, incoming, left, outlook)
        if not wait:
            return left - own
        # Where all answers began at the last moment, each that takes longer than expected would be
        # computed for nothing. One that begins as expected is given its row in any case.
        to_spare = min((LATE - 1) * own, (left - own - wait) / 2)
        return left - own - to_spare

    def _outlook(self, tokens: int, incoming: IncomingRequest) -> Outlook | None:
        """Return the forecast for a request with a prompt of `tokens` tokens.

        None where nothing else runs or waits: what is known of the pace is of the past then, and
        only a request that is admitted can show that it does not hold any more.
        """
        choices = incoming.params.n
        ahead = self._load.queue.ahead(incoming.priority, incoming.client, choices)
        work = self._work_ahead(incoming)
        running = work.running
        if not (running.seconds_left or running.beginning or ahead.choices):
            return None
        pace = self._load.pace
        expected = self._expected_tokens(tokens, incoming)
        rounds = self._load.rounds(incoming.client, choices, running)
        waits = self._load.waits
        wait = waits.seconds_to_start(ahead.choices + choices, ahead.prompt_tokens, work)
        # A row that is free would be idle without this request; one that others wait for had better
        # go to an answer that is in time even if it turns out slow.
        is_free = waits.finds_free_row(ahead.choices + choices, work)
        slowness = 1.0 if is_free else pace.slowness.value
        tokens_seconds = rounds * expected * pace.seconds_per_token
        own = pace.prompt_seconds(tokens) + tokens_seconds * slowness
        return Outlook(wait, own, work)

    def _too_late(
        self, tokens: int, incoming: IncomingRequest, left: float, outlook: Outlook
    ) -> JaxserveError:
        """Return the error for a request whose answer would come after its deadline.

        Args:
            left: Seconds until the deadline.
        """
        wait = outlook.wait
        own = outlook.own
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
            f"the queue is {wait:.2f} s long, and an answer takes {own:.2f} s; it could take "
            f"{LATE * wait + own:.2f} s in all, and the deadline leaves {left:.2f} s",
            self._places_in(outlook.work, places),
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

    def _places_in(self, work: Work, places: int) -> float:
        """Return the seconds after which a refused client is to come back."""
        return self._load.places.come_back_in(work, max(1, places))

    def _work_ahead(self, incoming: IncomingRequest | None = None) -> Work:
        """Return what is ahead of a request, or of one behind all others.

        Prompts in the queue are taken to be alike. What runs is counted anew only every
        RUNNING_SECONDS.
        """
        now = self._load.clock()
        if now - self._running_at > RUNNING_SECONDS:
            self._running = self._count_running()
            self._running_at = now
        if incoming:
            work = self._load.work_before(
                incoming.client, incoming.priority, incoming.params.n, self._running
            )
        else:
            work = Work(self._running, unbegun=sum(self._running.unbegun_of.values()))
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
