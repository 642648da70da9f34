"""Admission of requests: bounds on their fields, room among waiting requests, deadlines."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from jaxserve.errors import DeadlineError, QueueFullError, RequestError, RoleError
from jaxserve.request import Request
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.page_fetches import PageFetches
from jaxserve.server.core.place_forecast import PlaceForecast, Work
from jaxserve.server.core.prompt_encoder import utf8_size
from jaxserve.server.core.ttft_estimate import TTFTEstimate

MAX_ID_BYTES = 128
MAX_SALT_BYTES = 128
WORK_SECONDS = 0.05  # for which the work ahead is taken to be the same
MAX_PRIORITY = 100  # of either sign; a smaller number goes first


@dataclass(frozen=True, slots=True)
class _QueuedPrompt:
    """A prompt without a first token, and what is to be made from it."""

    tokens: int
    priority: int
    choices: int
    max_tokens: int


class AdmissionControl:
    """Decides whether a request may enter, and keeps the queue of those without a first token.

    Lives on the event loop. A request enters the queue when its fields are in order, before it is
    tokenized; its prompt counts from its submission to the engine on.

    Args:
        places: Forecast for refused clients.
        prefill_only: Whether only decode servers may ask, not clients.
        running: Function that returns the work of the choices that run at present.
        max_tokens: Limit of a request that gives none.
    """

    def __init__(
        self,
        limits: Limits,
        estimate: TTFTEstimate,
        places: PlaceForecast,
        page_fetches: PageFetches,
        prefill_only: bool,
        running: Callable[[], Work],
        max_tokens: int,
    ):
        self.estimate = estimate
        self._places = places
        self._running = running
        self._max_tokens = max_tokens
        self._work = Work(())
        self._work_at = -math.inf
        self._limits = limits
        self._page_fetches = page_fetches
        self._prefill_only = prefill_only
        # By the client's id; None before submission to the engine.
        self._queue: dict[str, _QueuedPrompt | None] = {}

    # ---- the queue of requests without a first token

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queue

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, request_id: str) -> None:
        """Add a request whose prompt is not tokenized yet."""
        self._queue[request_id] = None

    def queue_prompt(self, request_id: str, request: Request) -> None:
        """Count the prompt of a request that is submitted to the engine."""
        params = request.params
        self._queue[request_id] = _QueuedPrompt(
            len(request.prompt), request.priority, params.n, params.max_tokens or self._max_tokens
        )

    def leave(self, request_id: str) -> None:
        """Remove a request: its first token came, or it has ended."""
        self._queue.pop(request_id, None)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all requests that wait in the engine for their first token."""
        return self._tokens_ahead(MAX_PRIORITY)

    def _tokens_ahead(self, priority: int) -> int:
        """Count the prompt tokens that go before a new request of this priority."""
        queued = (prompt for prompt in self._queue.values() if prompt)
        return sum(prompt.tokens for prompt in queued if prompt.priority <= priority)

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
        if abs(incoming.priority) > MAX_PRIORITY:
            raise RequestError(
                "priority",
                f"is {incoming.priority}; it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}",
            )

    def check_queue(self, incoming: IncomingRequest) -> None:
        """QueueFullError when as many requests wait as may."""
        if len(self._queue) >= self._limits.max_waiting_requests:
            raise self._queue_full(
                f"{len(self._queue)} requests wait already, as many as --max-waiting-requests "
                f"allows",
                incoming,
            )

    def check_room(self, tokens: int, incoming: IncomingRequest) -> None:
        """Check that a prompt of `tokens` tokens fits the queue and can meet its deadline.

        Raises QueueFullError or DeadlineError.
        """
        waiting = self.waiting_tokens + self._page_fetches.tokens
        # A single prompt may be longer than the limit: it is admitted when nothing else waits.
        if waiting and waiting + tokens > self._limits.max_waiting_tokens:
            raise self._queue_full(
                f"{waiting} prompt tokens wait already; with {tokens} more they exceed "
                f"--max-waiting-tokens {self._limits.max_waiting_tokens}",
                incoming,
                tokens,
                missing_tokens=waiting + tokens - self._limits.max_waiting_tokens,
            )
        if incoming.deadline is None:
            return
        left = incoming.deadline - time.monotonic()
        ahead = self._tokens_ahead(incoming.priority)
        seconds = self.estimate.seconds_to_first_token(ahead, tokens)
        if seconds > left:
            raise DeadlineError(
                f"the first token would come in {seconds:.2f} s at best, the deadline leaves "
                f"{left:.2f} s"
            )

    def _queue_full(
        self, problem: str, incoming: IncomingRequest, tokens: int = 0, missing_tokens: int = 0
    ) -> QueueFullError:
        """Return the error for a request that finds the queue full.

        Args:
            tokens: Number of tokens of the prompt, if known.
            missing_tokens: Number of tokens that have to leave the queue.
        """
        work = self._work_ahead(incoming)
        places = math.ceil(missing_tokens / (work.prompt_tokens or tokens)) if tokens else 1
        return QueueFullError(problem, self._places.come_back_in(work, places))

    def _work_ahead(self, incoming: IncomingRequest) -> Work:
        """Return what is ahead of a request, as it was a moment ago where many are refused."""
        now = time.monotonic()
        if now - self._work_at > WORK_SECONDS:
            self._work = self._count_work(incoming)
            self._work_at = now
        return self._work

    def _count_work(self, incoming: IncomingRequest) -> Work:
        """Count what is ahead of a request; prompts in the queue are taken to be alike."""
        queued = [prompt for prompt in self._queue.values() if prompt]
        if not queued:  # none of them is tokenized: they are taken to be like this request
            params = incoming.params
            limit = params.max_tokens or self._max_tokens
            return replace(self._running(), choices=params.n, max_tokens=limit)
        return replace(
            self._running(),
            choices=fmean(prompt.choices for prompt in queued),
            prompt_tokens=fmean(prompt.tokens for prompt in queued),
            max_tokens=fmean(prompt.max_tokens for prompt in queued),
        )


def _check_size(name: str, text: str, limit: int) -> None:
    size = utf8_size(text)
    if size > limit:
        raise RequestError(name, f"has {size} bytes; the limit is {limit}")
