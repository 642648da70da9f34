"""Bounds of the waiting queue, and which requests leave it for those of other clients."""

from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.page_fetches import PageFetches
from jaxserve.server.core.waiting_queue import Newcomer, WaitingQueue

SPARE = 16  # requests that may be tokenized beyond a full queue, for which others will leave


class QueueBounds:
    """Limits of the queue in requests and in prompt tokens. Lives on the event loop."""

    def __init__(self, limits: Limits, queue: WaitingQueue, page_fetches: PageFetches):
        self._limits = limits
        self._queue = queue
        self._page_fetches = page_fetches

    @property
    def is_full(self) -> bool:
        """Return whether as many requests wait as may."""
        return self._over >= 0

    def may_enter(self, incoming: IncomingRequest) -> bool:
        """Return whether another request would give its place in a full queue up for this one."""
        newcomer = Newcomer(incoming.client, incoming.priority, requests=1)
        return self._over < SPARE and self._queue.displaced_by(newcomer, 1, 0) is not None

    def displaced_by(
        self, tokens: int, incoming: IncomingRequest, needs_place: bool
    ) -> list[str] | None:
        """Return the requests that leave for one that has entered; None if not enough can.

        Args:
            tokens: Tokens of its prompt.
            needs_place: Whether the queue was full when it entered.
        """
        newcomer = Newcomer(incoming.client, incoming.priority, tokens=tokens)
        requests = 1 if needs_place and self._over > 0 else 0
        return self._queue.displaced_by(newcomer, requests, self.tokens_over(tokens))

    @property
    def _over(self) -> int:
        """Number of requests beyond the limit; below 0, places that are left."""
        return len(self._queue) - self._limits.max_waiting_requests

    def tokens_over(self, tokens: int) -> int:
        """Return by how many tokens the queue would exceed its limit with a prompt of `tokens`.

        A single prompt may be longer than the limit: it is admitted when nothing else waits.
        """
        return self._tokens + tokens - self._limits.max_waiting_tokens if self._tokens else 0

    @property
    def requests_problem(self) -> str:
        """Problem of a request for which there is no place."""
        limit = self._limits.max_waiting_requests
        return f"{limit} requests wait already, as many as --max-waiting-requests allows"

    def tokens_problem(self, tokens: int) -> str:
        """Return the problem of a prompt for which there is no room."""
        return (
            f"{self._tokens} prompt tokens wait already; with {tokens} more they exceed "
            f"--max-waiting-tokens {self._limits.max_waiting_tokens}"
        )

    @property
    def _tokens(self) -> int:
        return self._queue.all.prompt_tokens + self._page_fetches.tokens
