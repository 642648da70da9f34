"""Costs of handing prompts over from a prefill server to a decode server, both as planned.

The trip adds time to the prompt, and spares other streams of the decode server from waiting.

    prefill server   |  chunk 1  |  chunk 2  |  chunk 3  |
    link                         | pages of 1 | pages of 2 | pages of 3 |
    decode server    | step | step | step | step | step | step | step | step with the tail | step |

The decode server computes the tail, the tokens that fill no whole page. Seconds are bounds: of both
servers (the floor of a step, plus what its devices must send each other) and of the link. They
contain no queue, no connection and no copy through a host's memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import jax.numpy as jnp

from jaxserve.engine.device.memory import slot_bytes
from jaxserve.engine.host.kv_export import wanted_pages
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.estimate import Estimate, chunks
from jaxserve.plan.roofline import Case
from jaxserve.plan.topology import Limits

SHORTEST = 512  # tokens of the shortest prompt, unless the context is shorter
MOST_ADDED = 0.1  # share of a prompt's time; a trip that adds more does not pay


@dataclass(frozen=True)
class Trip:
    """Costs of handing over a prompt of `tokens` tokens, of which nothing is cached.

    Times are in seconds.
    """

    tokens: int
    nbytes: int  # bytes that are sent
    transfer: float  # time of all bytes on the link
    prefill: float  # time for the prompt, alone on the prefill server
    arrival: float  # time from the start of the prefill until the last byte has arrived
    tail: float  # time for what the decode server then computes, beside its streams
    steps: int  # steps that the prompt would take on the decode server
    slowest: float  # time of the longest of `steps`
    # Time by which `steps` would hold up each stream of the decode server, less that of the tail.
    spared: float

    @property
    def added(self) -> float:
        """Seconds to the first token, compared to a server that computes the prompt alone."""
        return self.arrival + self.tail - self.prefill

    @property
    def hidden(self) -> float:
        """Share of the transfer that is over when the prompt is computed, 0 to 1."""
        left = max(self.arrival - self.prefill, 0)
        return 1 - min(left / self.transfer, 1) if self.transfer else 0.0

    @property
    def pays(self) -> bool:
        """True if the trip adds little to the prompt, and less than it spares other streams."""
        return self.added <= MOST_ADDED * self.prefill and self.added < self.spared


@dataclass(frozen=True)
class Handover:
    """Costs of handing over prompts of many lengths."""

    estimate: Estimate
    limits: Limits
    # Bytes/s. The lanes of the prefill server share the link: all of them compute such a prompt.
    link: float

    @property
    def streams(self) -> int:
        """Streams beside the prompt in a lane of the decode server.

        All other rows, as far as the cache holds them.
        """
        return max(min(self._deployment.config.max_batch, self.estimate.held_rows()) - 1, 0)

    @property
    def tpot(self) -> float:
        """Seconds per token of these streams without a prompt; 0 if there are no streams."""
        return self._seconds(*self._beside) if self._beside else 0.0

    @cached_property
    def trips(self) -> list[Trip]:
        """Costs by ascending length of the prompt."""
        config = self._deployment.config
        return [self._trip(tokens) for tokens in lengths(min(config.max_context, config.capacity))]

    @property
    def pays_from(self) -> Trip | None:
        """The shortest trip that pays, as all longer ones do; None if the longest does not pay."""
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
        here = self._steps(0, tokens)
        tail = self._steps(self._reach(tokens), tokens)
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
        """Return the seconds of each step in which the decode server computes these tokens."""
        cases = chunks(start, stop, self._deployment.config.step_tokens - self.streams)
        return [self._seconds(case, *self._beside) for case in cases]

    def _held_up(self, steps: Sequence[float]) -> float:
        """Return the seconds by which the steps hold up each stream."""
        return sum(step - self.tpot for step in steps) if self._beside else 0.0

    def _reach(self, tokens: int) -> int:
        """Return how many tokens of a prompt lie in pages that are sent."""
        config = self._deployment.config
        wanted = wanted_pages(config, tokens, 0, config.page_size)
        return max(pages.stop for pages in wanted) * config.page_size

    @property
    def _beside(self) -> list[Case]:
        """Decode steps of the streams, which every step of the decode server has as well."""
        if not self.streams:
            return []
        return [Case("decode", self.streams, self.estimate.context, self.streams)]

    def _seconds(self, *cases: Case) -> float:
        return self.estimate.seconds(self.limits, *cases)

    @property
    def _deployment(self) -> Deployment:
        return self.estimate.deployment


def lengths(longest: int) -> Iterator[int]:
    """Yield lengths of prompts in tokens: doubled again and again, and the longest."""
    tokens = SHORTEST
    while tokens < longest:
        yield tokens
        tokens *= 2
    yield longest


def parts_of(deployment: Deployment, tokens: int, ends: Sequence[int]) -> list[int]:
    """Return the bytes that become ready to be sent at each of these ends of chunks.

    Whole pages as an export reads them: of a window only what the decode server's first token sees,
    of states the one behind the last page, and each of the model's KV heads once, however many
    devices hold it.
    """
    config = deployment.config
    found = [0] * len(ends)
    wanted = wanted_pages(config, tokens, 0, config.page_size)
    for page, pages in zip(_entry_bytes(deployment), wanted, strict=True):
        ready = [
            len(range(pages.start, min(pages.stop, end // config.page_size))) for end in (0, *ends)
        ]
        found = [
            part + (new - old) * page
            for part, (old, new) in zip(found, pairwise(ready), strict=True)
        ]
    return found


def _entry_bytes(deployment: Deployment) -> Iterator[int]:
    """Yield the bytes of a page of each page group, and those of a state if there are any."""
    config = deployment.config
    spec = deployment.target.spec
    for group in spec.page_groups():
        layout = group.layout(config.page_size, jnp.dtype(config.page_dtype))
        yield len(group.layers) * config.page_size * layout.token_bytes
    if spec.state:
        yield slot_bytes(spec)


def arrival(ends: Sequence[float], transfer: Sequence[float]) -> float:
    """Return the seconds until the last part has arrived.

    Parts go over the link one after the other, and none before its end, when it is computed.
    """
    free = 0.0
    for end, seconds in zip(ends, transfer, strict=True):
        if seconds:
            free = max(free, end) + seconds
    return free
