"""Every step of a deployment through the real compiler, and what it says of each."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import jax
from jax.errors import JaxRuntimeError

from jaxserve.engine.buckets import Bucket, BucketPlan
from jaxserve.engine.inspection import Inspection, inspect
from jaxserve.engine.lowering import Footprint, Lowering
from jaxserve.errors import MemoryLimitError
from jaxserve.plan.deployment import Deployment

Progress = Callable[[int, int, str], None]  # done, total, what
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class CompiledStep:
    """seconds: of tracing, lowering and compiling."""

    found: Inspection
    seconds: float


def compile_steps(deployment: Deployment, buckets: Sequence[Bucket], progress: Progress) -> dict[str, CompiledStep]:
    """The writers of rows and these steps, by name; MemoryLimitError when the compiler refuses one."""
    lowering, began = deployment.lowering, time.monotonic()
    done = {name: _compile(lowering, name, lambda w=w: w) for name, w in lowering.writers().items()}
    for count, bucket in enumerate(buckets):
        progress(count, len(buckets), f"{bucket}{_left(count, len(buckets), time.monotonic() - began)}")
        done[str(bucket)] = _compile(lowering, str(bucket), partial(lowering.step, bucket))
        jax.clear_caches()  # of a model with many layers, each step's trace takes gigabytes
    progress(len(buckets), len(buckets), "")
    return done


def _compile(lowering: Lowering, name: str, lower: Callable[[], jax.stages.Lowered]) -> CompiledStep:
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
        progress(len(asked), len(kinds), str(bucket))
        asked.append(bucket)
        with memory_errors(str(bucket)):
            return lowering.footprint(bucket)

    return footprint


@contextmanager
def memory_errors(step: str) -> Iterator[None]:
    """MemoryLimitError, in the compiler's own words, where it finds that a step cannot fit."""
    try:
        yield
    except JaxRuntimeError as error:
        words = str(error).strip().splitlines()[0]
        if not words.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise MemoryLimitError(f"{step}: the compiler says {words}", _missing(words)) from None


def _missing(words: str) -> int:
    """(17.12G) exceeds available HBM (15.75G) -> 1.37 GiB; 0 where the words have no two sizes."""
    sizes = [float(number) * 2 ** UNITS[unit] for number, unit in re.findall(r"\(([\d.]+)([KMGT]?)\)", words)]
    return round(sizes[0] - sizes[1]) if len(sizes) == 2 else 0
