"""Steps of a deployment, compiled by the real compiler, and what it says of each."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import jax

from jaxserve.engine.buckets import Bucket, BucketPlan
from jaxserve.engine.device.lowering import Footprint, Lowering
from jaxserve.engine.device.memory import memory_errors
from jaxserve.plan.deployment import Deployment
from jaxserve.plan.hlo.inspection import Inspection, inspect

Progress = Callable[[int, int, str], None]  # done, total, what


@dataclass(frozen=True)
class CompiledStep:
    """Findings of the compiler about a step."""

    found: Inspection
    seconds: float  # for tracing, lowering and compiling


def compile_steps(
    deployment: Deployment, buckets: Sequence[Bucket], progress: Progress
) -> dict[str, CompiledStep]:
    """Compile steps, and the programs beside them that write rows and pages; by name.

    Raises MemoryLimitError if the compiler refuses one.
    """
    lowering = deployment.lowering
    began = time.monotonic()
    small = lowering.writers() | lowering.page_programs()
    done = {name: _compile(lowering, name, lambda w=w: w) for name, w in small.items()}
    for count, bucket in enumerate(buckets):
        left = _left(count, len(buckets), time.monotonic() - began)
        progress(count, len(buckets), f"{bucket}{left}")
        done[str(bucket)] = _compile(lowering, str(bucket), partial(lowering.step, bucket))
        jax.clear_caches()  # the trace of one step takes gigabytes if a model has many layers
    progress(len(buckets), len(buckets), "")
    return done


def _compile(
    lowering: Lowering, name: str, lower: Callable[[], jax.stages.Lowered]
) -> CompiledStep:
    began = time.monotonic()
    with memory_errors(name):
        compiled = lower().compile()
    return CompiledStep(inspect(compiled, lowering), time.monotonic() - began)


def _left(done: int, total: int, seconds: float) -> str:
    """Return the time that is left, if all steps take equally long."""
    if not done:
        return ""
    return f", {timedelta(seconds=round(seconds / done * (total - done)))} left"


def asking(progress: Progress) -> Callable[[Lowering, Bucket], Footprint]:
    """Return Lowering.footprint with a progress bar."""
    asked: list[Bucket] = []

    def footprint(lowering: Lowering, bucket: Bucket) -> Footprint:
        kinds = {b.kind for b in BucketPlan.of(lowering.config).buckets}
        progress(len(asked) % len(kinds), len(kinds), str(bucket))
        asked.append(bucket)
        return lowering.footprint(bucket)

    return footprint
