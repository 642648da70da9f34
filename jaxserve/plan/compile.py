"""Every step of a deployment through the real compiler, and what it says of each."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import jax
from jax.errors import JaxRuntimeError

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.inspection import Inspection, inspect
from jaxserve.engine.lowering import Footprint, Lowering
from jaxserve.errors import MemoryLimitError
from jaxserve.plan.deployment import Deployment

Progress = Callable[[int, int, str], None]  # done, total, what
KINDS = 3  # of steps: decode, prefill, score
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True)
class CompiledStep:
    """seconds: of tracing, lowering and compiling."""

    found: Inspection
    seconds: float


def compile_steps(deployment: Deployment, buckets: Sequence[Bucket], progress: Progress) -> dict[str, CompiledStep]:
    """These steps and the writers of rows, by name; MemoryLimitError when the compiler refuses one."""
    lowering, done = deployment.lowering, dict[str, CompiledStep]()
    jobs = {name: partial(lowered.compile) for name, lowered in lowering.writers().items()}
    jobs |= {str(bucket): partial(_compile, lowering, bucket) for bucket in buckets}
    began = time.monotonic()
    for name, job in jobs.items():
        progress(len(done), len(jobs), f"{name}{_left(len(done), len(jobs), time.monotonic() - began)}")
        start = time.monotonic()
        with memory_errors(name):
            compiled = job()
        done[name] = CompiledStep(inspect(compiled, lowering), time.monotonic() - start)
        jax.clear_caches()  # of a model with many layers, each step's trace takes gigabytes
    progress(len(jobs), len(jobs), "")
    return done


def _compile(lowering: Lowering, bucket: Bucket) -> jax.stages.Compiled:
    return lowering.step(bucket).compile()


def _left(done: int, total: int, seconds: float) -> str:
    """What is left, if all go on as fast as those that are done; writers take no time, so nothing is said of them."""
    return f", {seconds / done * (total - done) / 60:.0f} min left" if seconds > 5 and done else ""


def asking(progress: Progress) -> Callable[[Lowering, Bucket], Footprint]:
    """Lowering.footprint that tells how far it is."""
    asked: list[Bucket] = []

    def footprint(lowering: Lowering, bucket: Bucket) -> Footprint:
        progress(len(asked), KINDS, str(bucket))
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
