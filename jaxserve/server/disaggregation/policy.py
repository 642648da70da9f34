"""Decide whether a prompt is computed here or by a prefill server, and by which one."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from jaxserve.server.disaggregation.prefix_affinity import Blocks


class Decision(StrEnum):
    """Place where a prompt is computed, and the reason; the values are labels of a metric."""

    REMOTE = "remote"
    SHORT = "local_short"  # fewer uncached tokens than --prefill-threshold
    SCORED = "local_scored"  # its log-probabilities are wanted, which cached pages do not have
    ALONE = "local_no_server"  # no prefill server is ready
    BUSY = "local_busy"  # every ready one has more waiting tokens than --prefill-queue-tokens


class Candidate(Protocol):
    """A prefill server as the decision sees it."""

    @property
    def queue(self) -> int:
        """Tokens of prompts that it has not computed yet."""
        ...

    def cached(self, blocks: Blocks) -> int:
        """Return how many tokens of a prompt it is likely to have cached."""
        ...


@dataclass(frozen=True)
class Policy:
    """Limits of a decode server.

    `threshold` is the number of uncached tokens from which on a prompt is computed remotely.
    `queue_tokens` is the number of waiting tokens above which a prefill server is busy.
    """

    threshold: int
    queue_tokens: int

    def is_short(self, uncached: int) -> bool:
        return uncached < self.threshold

    def choose[C: Candidate](self, blocks: Blocks, ready: Iterable[C]) -> C | None:
        """Return the server expected to finish a prompt first; None where all are busy.

        Every server is taken to be equally fast, so the one with the fewest tokens to compute is
        first. The prompt's length is the same for all and left out; what a server has cached of it
        counts against its queue.
        """
        free = [server for server in ready if server.queue <= self.queue_tokens]
        return min(free, key=lambda server: server.queue - server.cached(blocks), default=None)
