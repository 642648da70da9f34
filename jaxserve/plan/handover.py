"""Prompts handed over between two servers as planned: what the trip adds to a prompt, and what it
spares the others.

    prefill server   |  chunk 1  |  chunk 2  |  chunk 3  |
    link                         | pages of 1 | pages of 2 | pages of 3 |
    decode server    | step | step | step | step | step | step | step | step with the tail | step |

The tail, of which there is no whole page, is computed by the decode server. Seconds are bounds, of
both servers (the floor of a step and what its devices send each other, one after the other) and of
the link: no queue, no connection and no copy through a host's memory is in them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import jax.numpy as jnp

from jaxserve.engine.host.kv_export import wanted_pages
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.estimate import Account, chunks
from jaxserve.plan.roofline import Case, Limits, token_bytes

SHORTEST = 512  # tokens of a prompt that is looked at, where the context has so many
MOST_ADDED = 0.1  # to the time of a prompt: a trip that adds more does not pay


@dataclass(frozen=True)
class Trip:
    """Of a prompt of so many tokens, of which nothing is cached. nbytes: of what is sent. Seconds:

    transfer: of all of it over the link. prefill: of the prompt, alone on the prefill server.
    arrival: from its beginning until all is through. tail: of what the decode server computes then,
    beside its streams.

    steps: that the prompt would take on the decode server. slowest: seconds of the longest of them.
    spared: seconds by which each stream would be held up by them, and is not.
    """

    tokens: int
    nbytes: int
    transfer: float
    prefill: float
    arrival: float
    tail: float
    steps: int
    slowest: float
    spared: float

    @property
    def added(self) -> float:
        """Seconds to the first token, compared to a server that computes the prompt alone."""
        return self.arrival + self.tail - self.prefill

    @property
    def hidden(self) -> float:
        """The share of the transfer that is over when the prompt is computed."""
        left = max(self.arrival - self.prefill, 0)
        return 1 - min(left / self.transfer, 1) if self.transfer else 0.0

    @property
    def pays(self) -> bool:
        return self.added <= MOST_ADDED * self.prefill and self.added < self.spared


@dataclass(frozen=True)
class Handover:
    """link: bytes/s that the lanes of the prefill server share, all of which compute such a
    prompt."""

    account: Account
    limits: Limits
    link: float

    @property
    def streams(self) -> int:
        """Of a lane of the decode server beside the prompt: its other rows, as far as the cache
        holds them.
        """
        return max(min(self._deployment.config.max_batch, self.account.held_rows()) - 1, 0)

    @property
    def tpot(self) -> float:
        """Of these streams, while there is no prompt; 0 where there are none."""
        return self._seconds(*self._beside) if self._beside else 0.0

    @cached_property
    def trips(self) -> list[Trip]:
        """Of prompts of ascending lengths."""
        config = self._deployment.config
        return [self._trip(tokens) for tokens in lengths(min(config.max_context, config.capacity))]

    @property
    def pays_from(self) -> Trip | None:
        """The shortest of these whose trip pays as that of every longer one does; None: the longest
        does not pay.
        """
        found = None
        for trip in reversed(self.trips):
            if not trip.pays:
                break
            found = trip
        return found

    def _trip(self, tokens: int) -> Trip:
        cases = chunks(0, tokens, self._deployment.config.step_tokens)
        ends = list(accumulate(self._seconds(case) for case in cases))
        parts = parts_of(self._deployment, tokens, [case.context + case.tokens for case in cases])
        transfer = [part * self._deployment.config.lanes / self.link for part in parts]
        here, tail = self._steps(0, tokens), self._steps(self._reach(tokens), tokens)
        return Trip(
            tokens=tokens,
            nbytes=sum(parts),
            transfer=sum(transfer),
            prefill=ends[-1],
            arrival=arrival(ends, transfer),
            tail=sum(tail),
            steps=len(here),
            slowest=max(here),
            spared=self._held_up(here) - self._held_up(tail),
        )

    def _steps(self, start: int, stop: int) -> list[float]:
        """Seconds of the decode server's steps with these tokens of a prompt in them."""
        cases = chunks(start, stop, self._deployment.config.step_tokens - self.streams)
        return [self._seconds(case, *self._beside) for case in cases]

    def _held_up(self, steps: Sequence[float]) -> float:
        """Seconds by which these steps are longer than the streams' own."""
        return sum(step - self.tpot for step in steps) if self._beside else 0.0

    def _reach(self, tokens: int) -> int:
        """Tokens of a prompt whose pages travel."""
        config = self._deployment.config
        return (
            max(pages.stop for pages in wanted_pages(config, tokens, 0, config.page_size))
            * config.page_size
        )

    @property
    def _beside(self) -> list[Case]:
        return (
            [Case("decode", self.streams, self.account.context, self.streams)]
            if self.streams
            else []
        )

    def _seconds(self, *cases: Case) -> float:
        return self.account.seconds(self.limits, *cases)

    @property
    def _deployment(self) -> Deployment:
        return self.account.deployment


def lengths(longest: int) -> Iterator[int]:
    """Of prompts: doubling, up to the longest."""
    tokens = SHORTEST
    while tokens < longest:
        yield tokens
        tokens *= 2
    yield longest


def parts_of(deployment: Deployment, tokens: int, ends: Sequence[int]) -> list[int]:
    """Bytes that there are to be sent of a prompt when it is computed up to each of these tokens,
    beside those before.

    Whole pages as a KVExport reads them: of a window what the decode server's first token sees, and
    each of the model's own kv heads once, however many devices hold it.
    """
    config, found = deployment.config, [0] * len(ends)
    wanted = wanted_pages(config, tokens, 0, config.page_size)
    for group, pages in zip(deployment.target.spec.page_groups(), wanted, strict=True):
        layout = group.layout(config.page_size, jnp.dtype(config.page_dtype))
        page = len(group.layers) * config.page_size * token_bytes(layout)
        ready = [
            len(range(pages.start, min(pages.stop, end // config.page_size))) for end in (0, *ends)
        ]
        found = [
            part + (new - old) * page
            for part, (old, new) in zip(found, pairwise(ready), strict=True)
        ]
    return found


def arrival(ends: Sequence[float], transfer: Sequence[float]) -> float:
    """Seconds until the last part is through, one after the other, of which each is ready at its
    end.
    """
    free = 0.0
    for end, seconds in zip(ends, transfer, strict=True):
        free = max(free, end) + seconds if seconds else free
    return free
