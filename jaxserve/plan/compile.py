"""Every step of a deployment through the real compiler, and what it says of each."""

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
    """seconds: of tracing, lowering and compiling."""

    found: Inspection
    seconds: float


def compile_steps(
    deployment: Deployment, buckets: Sequence[Bucket], progress: Progress
) -> dict[str, CompiledStep]:
    """What is no step, and these steps, by name; MemoryLimitError when the compiler refuses one."""
    lowering, began = deployment.lowering, time.monotonic()
    small = lowering.writers() | lowering.page_programs()
    done = {name: _compile(lowering, name, lambda w=w: w) for name, w in small.items()}
    for count, bucket in enumerate(buckets):
        progress(
            count, len(buckets), f"{bucket}{_left(count, len(buckets), time.monotonic() - began)}"
        )
        done[str(bucket)] = _compile(lowering, str(bucket), partial(lowering.step, bucket))
        jax.clear_caches()  # of a model with many layers, each step's trace takes gigabytes
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
    """What is left, if the others take as long as those that are done."""
    return f", {timedelta(seconds=round(seconds / done * (total - done)))} left" if done else ""


def asking(progress: Progress) -> Callable[[Lowering, Bucket], Footprint]:
    """Lowering.footprint that tells how far it is."""
    asked: list[Bucket] = []

    def footprint(lowering: Lowering, bucket: Bucket) -> Footprint:
        kinds = {b.kind for b in BucketPlan.of(lowering.config).buckets}
        progress(len(asked) % len(kinds), len(kinds), str(bucket))
        asked.append(bucket)
        return lowering.footprint(bucket)

    return footprint
