"""Estimate of a deployment: its memory, floors of its times, ceilings of its rates, and prices.

A floor is a time that no step can undercut, and a ceiling the rate that follows from it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.memory import MemoryBudget, bytes_per_device
from jaxserve.plan.compile import CompiledStep
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.hlo.inspection import Inspection
from jaxserve.plan.roofline import Case, Work
from jaxserve.plan.topology import Limits

MILLION = 1e6
HOUR = 3600


@dataclass(frozen=True)
class Batch:
    """Decode steps with a number of rows in every lane."""

    rows: int
    streams: int  # rows of all lanes
    tpot: float  # floor of a step, in seconds
    exchange: float  # seconds that devices need to send each other what they must; not in `tpot`
    tokens_per_second: float
    usd: float | None  # price of a million output tokens; None without a price
    held: bool  # True if the cache has pages for all rows


def chunks(start: int, stop: int, step_tokens: int) -> list[Case]:
    """Return the steps that compute tokens `start` to `stop` of a prompt, step_tokens in each."""
    begins = range(start, stop, step_tokens)
    return [Case("prefill", 1, begin, min(step_tokens, stop - begin)) for begin in begins]


@dataclass(frozen=True)
class Estimate:
    """Needs of a deployment, and the best that it can do."""

    deployment: Deployment
    context: int  # positions of a decoding sequence, and tokens of a prompt
    limits: Limits | None
    price: float | None = None  # USD per chip and hour
    # Steps that were compiled, by name; where none were, the memory of steps is counted.
    steps: Mapping[str, CompiledStep] = field(default_factory=dict)
    # Bytes/s to a server of the same kind that prompts are handed over to.
    link: float | None = None

    # ---- memory, in bytes of one device

    @cached_property
    def budget(self) -> MemoryBudget:
        """Memory of one device; steps that were not compiled count as the widest of their kind."""
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
        """Return what was compiled beside steps: the programs that write rows and pages."""
        names = {str(bucket) for bucket in self.deployment.buckets}
        return [step.found for name, step in self.steps.items() if name not in names]

    def _like(self, bucket: Bucket) -> Inspection:
        """Return what the compiler says of this bucket, or of the widest compiled of its kind."""
        alike = sorted(
            b for b in self.deployment.buckets if b.kind == bucket.kind and str(b) in self.steps
        )
        return self.steps[str(bucket if bucket in alike else alike[-1])].found

    @property
    def cache(self) -> int:
        """Bytes of the KV cache."""
        return bytes_per_device(self.deployment.lowering.state.kept)

    @property
    def padding(self) -> int:
        """Bytes that the compiler adds to weights and state.

        Tiles of the chip that are not full, and the uploaded plan of a step.
        """
        logical = self.budget.weights + self.budget.rows + self.cache
        return max((step.found.arguments - logical for step in self.steps.values()), default=0)

    @property
    def spare(self) -> int:
        """Bytes of a device's memory that are left; below 0, bytes that are missing."""
        return self.budget.left - self.cache - self.padding

    @property
    def fits(self) -> bool:
        """True if the deployment fits the memory of its devices."""
        return self.spare >= 0

    @property
    def lane_tokens(self) -> int:
        """Tokens that the cache of one lane holds; of a pool with a window fewer."""
        config = self.deployment.config
        return max(pool.pages for pool in config.page_pools) * config.page_size

    @property
    def device_tokens(self) -> float:
        """Tokens of the cache per device.

        With tensor parallelism, several devices share the heads of the same tokens.
        """
        return self.lane_tokens * self.deployment.config.lanes / self.deployment.topology.count

    def held_rows(self) -> int:
        """Return how many sequences of `context` tokens a lane has pages for."""
        return self.deployment.config.held_rows(self.context)

    # ---- time

    def case(self, bucket: Bucket) -> Case:
        """Return the case that fills a bucket: decodes at `context`, or the start of a prompt."""
        if bucket.kind == "decode":
            return Case("decode", bucket.rows, self.context, bucket.tokens, bucket.steps)
        return Case(bucket.kind, 1, 0, bucket.tokens)

    def work(self, bucket: Bucket) -> Work:
        """Return the work of one step of a bucket; a launch of several does it for each."""
        return self.deployment.work(self.case(bucket))

    def tpot(self, limits: Limits, rows: int) -> float:
        """Return the floor of a decode step with this many rows in a lane, in seconds."""
        return self.deployment.work(Case("decode", rows, self.context, rows)).floor(limits)

    def ttft(self, limits: Limits) -> float:
        """Return the floor of a prompt of `context` tokens that runs alone, in seconds."""
        return self.prompt(limits, self.context)

    def prompt(self, limits: Limits, tokens: int) -> float:
        """Return the floor of a prompt of so many tokens that runs alone, in seconds."""
        cases = chunks(0, tokens, self.deployment.config.step_tokens)
        return sum(self.deployment.work(case).floor(limits) for case in cases)

    def prompt_rate(self, limits: Limits) -> float:
        """Return the ceiling of prompt tokens per second, all lanes together."""
        return self.deployment.config.lanes * self.context / self.ttft(limits)

    def batches(self, limits: Limits) -> Iterator[Batch]:
        """Yield the batches that decode steps are compiled for, the smallest first."""
        held_rows = self.held_rows()
        for bucket in self.deployment.buckets:
            if bucket.kind != "decode" or bucket.steps > 1:
                continue
            tpot = self.tpot(limits, bucket.rows)
            streams = bucket.rows * self.deployment.config.lanes
            rate = streams / tpot
            yield Batch(
                rows=bucket.rows,
                streams=streams,
                tpot=tpot,
                exchange=self.exchange(bucket),
                tokens_per_second=rate,
                usd=self.usd(rate),
                held=bucket.rows <= held_rows,
            )

    def exchange(self, bucket: Bucket) -> float:
        """Return the least seconds that devices need to send each other what a launch must.

        All links of a device are used at once. The bytes are those of the compiled step, or counted
        where it was not compiled. The floor of a step does not contain this time. It is 0 on a CPU,
        whose speed is not published.
        """
        step = self.steps.get(str(bucket))
        counted = self.deployment.sent(self.case(bucket)) * bucket.steps
        return self._on_links(sum(step.found.sent.values()) if step else counted)

    def _on_links(self, nbytes: float) -> float:
        chip = self.deployment.topology.chip
        return nbytes / chip.link if chip else 0.0

    def seconds(self, limits: Limits, *cases: Case) -> float:
        """Return the floor of one step with all cases in it, plus what its devices must send."""
        computing = self.deployment.work(*cases).floor(limits)
        return computing + self._on_links(self.deployment.sent(*cases))

    def usd(self, tokens_per_second: float) -> float | None:
        """Return the price of a million tokens at this rate; None without a price."""
        if self.price is None:
            return None
        return self.price * self.deployment.topology.chips / (tokens_per_second * HOUR) * MILLION
