"""Whether a prompt is computed here or elsewhere, and where."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from jaxserve.server.disaggregation.prefix_affinity import Blocks


class Decision(StrEnum):
    """As metrics name it."""

    REMOTE = "remote"
    SHORT = "local_short"  # fewer tokens are not cached than --prefill-threshold
    SCORED = "local_scored"  # its log-probabilities are asked for, which nothing cached has
    ALONE = "local_no_server"  # no prefill server is ready
    BUSY = "local_busy"  # all that are have more to do than --prefill-queue-tokens


class Candidate(Protocol):
    """A prefill server as the decision sees it."""

    @property
    def queue(self) -> int:
        """Tokens of prompts that it has not computed yet."""
        ...

    def cached(self, blocks: Blocks) -> int:
        """Tokens of a prompt of these blocks that it is likely to have already."""
        ...


@dataclass(frozen=True)
class Policy:
    """threshold: tokens that are not cached, from which on a prompt travels. queue_tokens: see
    Decision.BUSY.
    """

    threshold: int
    queue_tokens: int

    def is_short(self, uncached: int) -> bool:
        return uncached < self.threshold

    def choose[C: Candidate](self, blocks: Blocks, ready: Iterable[C]) -> C | None:
        """Who will have computed it first; None where all are busy."""
        free = [server for server in ready if server.queue <= self.queue_tokens]
        return min(free, key=lambda server: server.queue - server.cached(blocks), default=None)
