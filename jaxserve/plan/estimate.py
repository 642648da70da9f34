"""What a deployment comes to: memory, floors of its steps, ceilings by batch, and what a token
costs at least.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.memory import MemoryBudget, bytes_per_device
from jaxserve.plan.compile import CompiledStep
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.hlo.inspection import Inspection
from jaxserve.plan.roofline import Case, Limits, Work

MILLION = 1e6
HOUR = 3600


@dataclass(frozen=True)
class Batch:
    """Decodes of so many rows in every lane. tpot: floor, in seconds. exchange: seconds of what is
    sent, beside it.

    usd: per million tokens of output, None without a price. held: whether the cache has pages for
    them.
    """

    rows: int
    streams: int
    tpot: float
    exchange: float
    tokens_per_second: float
    usd: float | None
    held: bool


def chunks(start: int, stop: int, most: int) -> list[Case]:
    """Steps that compute these tokens of a prompt. most: tokens of one."""
    return [
        Case("prefill", 1, begin, min(most, stop - begin)) for begin in range(start, stop, most)
    ]


@dataclass(frozen=True)
class Account:
    """context: positions of a decoding sequence, and tokens of a prompt. price: USD per chip and
    hour, or None.

    steps: what was compiled, by name; without any, what steps take is an estimate. link: bytes/s to
    another server like it that prompts are handed over to, or None.
    """

    deployment: Deployment
    context: int
    limits: Limits | None
    price: float | None = None
    steps: Mapping[str, CompiledStep] = field(default_factory=dict)
    link: float | None = None

    # ---- memory, in bytes of one device

    @cached_property
    def budget(self) -> MemoryBudget:
        """With what the steps take: each that was not compiled, as much as the widest of its kind
        that was.
        """
        if not self.steps:
            return self.deployment.estimated_budget()
        found = [step.found for step in self.steps.values()]
        programs = self._writers() + [self._like(bucket) for bucket in self.deployment.buckets]
        return replace(
            self.deployment.budget(),
            temporaries=max(step.temporaries + step.unaliased for step in found),
            programs=sum(step.program for step in programs),
        )

    def _writers(self) -> list[Inspection]:
        names = {str(bucket) for bucket in self.deployment.buckets}
        return [step.found for name, step in self.steps.items() if name not in names]

    def _like(self, bucket: Bucket) -> Inspection:
        """What was compiled of this bucket, or of the widest of its kind."""
        alike = sorted(
            b for b in self.deployment.buckets if b.kind == bucket.kind and str(b) in self.steps
        )
        return self.steps[str(bucket if bucket in alike else alike[-1])].found

    @property
    def cache(self) -> int:
        return bytes_per_device(self.deployment.lowering.state.pages)

    @property
    def padding(self) -> int:
        """What the compiler adds to weights and state: tiles that are not full, and the uploaded
        plan of a step.
        """
        logical = self.budget.weights + self.budget.rows + self.cache
        return max((step.found.arguments - logical for step in self.steps.values()), default=0)

    @property
    def spare(self) -> int:
        """What is left of a device's memory; below 0, what is missing."""
        return self.budget.left - self.cache - self.padding

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    @property
    def lane_tokens(self) -> int:
        """Tokens that the cache of a lane holds, at the most."""
        config = self.deployment.config
        return max(pool.pages for pool in config.pools) * config.page_size

    @property
    def device_tokens(self) -> float:
        """Of these, what falls to each device: with tensor parallelism, several hold the heads of
        the same tokens.
        """
        return self.lane_tokens * self.deployment.config.lanes / self.deployment.topology.count

    def held_rows(self) -> int:
        """Sequences of `context` tokens that a lane has pages for."""
        config = self.deployment.config
        return min(pool.pages // config.pages_held(pool, self.context) for pool in config.pools)

    # ---- time

    def case(self, bucket: Bucket) -> Case:
        """A bucket filled: by decodes at `context`, or by one prompt from its beginning."""
        if bucket.kind == "decode":
            return Case("decode", bucket.rows, self.context, bucket.tokens, bucket.steps)
        return Case(bucket.kind, 1, 0, bucket.tokens)

    def work(self, bucket: Bucket) -> Work:
        """Of one step; a launch of several has as much for each."""
        return self.deployment.work(self.case(bucket))

    def tpot(self, limits: Limits, rows: int) -> float:
        """Floor of the seconds that a decode step of so many rows takes."""
        return self.deployment.work(Case("decode", rows, self.context, rows)).floor(limits)

    def ttft(self, limits: Limits) -> float:
        """Floor of the seconds that a prompt of `context` tokens takes alone."""
        cases = chunks(0, self.context, self.deployment.config.step_tokens)
        return sum(self.deployment.work(case).floor(limits) for case in cases)

    def prompt_rate(self, limits: Limits) -> float:
        """Ceiling of prompt tokens per second, all lanes together."""
        return self.deployment.config.lanes * self.context / self.ttft(limits)

    def batches(self, limits: Limits) -> Iterator[Batch]:
        """Of the decode steps that there are."""
        config, held = self.deployment.config, self.held_rows()
        for bucket in self.deployment.buckets:
            if bucket.kind == "decode" and bucket.steps == 1:
                tpot, streams = self.tpot(limits, bucket.rows), bucket.rows * config.lanes
                rate = streams / tpot
                yield Batch(
                    bucket.rows,
                    streams,
                    tpot,
                    self.exchange(bucket),
                    rate,
                    self.usd(rate),
                    bucket.rows <= held,
                )

    def exchange(self, bucket: Bucket) -> float:
        """Seconds that what a launch sends takes at least, on all links of a device at once; not in
        its floor.

        What the compiled step sends, or what is counted. 0 for a CPU: nobody publishes how fast it
        would be.
        """
        step = self.steps.get(str(bucket))
        counted = self.deployment.sent(self.case(bucket)) * bucket.steps
        return self._on_links(sum(step.found.sent.values()) if step else counted)

    def _on_links(self, nbytes: float) -> float:
        chip = self.deployment.topology.chip
        return nbytes / chip.link if chip else 0.0

    def seconds(self, limits: Limits, *cases: Case) -> float:
        """Of one step with all of these in it: its floor and what is sent at least, as counted, one
        after the other.
        """
        return self.deployment.work(*cases).floor(limits) + self._on_links(
            self.deployment.sent(*cases)
        )

    def usd(self, tokens_per_second: float) -> float | None:
        """Per million tokens at this rate."""
        if self.price is None:
            return None
        return self.price * self.deployment.topology.chips / (tokens_per_second * HOUR) * MILLION
