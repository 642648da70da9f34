"""Measured times of decode and verify steps, by which speculation decides what pays.

The steps are launched with rows that hold nothing: what is measured is everything but the reading
of pages.
"""

import time
from collections.abc import Iterable
from typing import Final

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.empty_step import empty_step
from jaxserve.engine.engine import Runner
from jaxserve.engine.host.speculation import Costs
from jaxserve.engine.plan import StepPlan

LAUNCHES: Final = 4  # of each step; the fastest counts


def measure(runner: Runner, buckets: Iterable[Bucket], lanes: int, no_row: int) -> Costs:
    """Run every decode and verify step among the compiled ones and return their seconds.

    A decode costs its share of the launch where several are launched as one.

    Args:
        no_row: Row id that is out of range, so that no row is changed.
    """
    found: dict[tuple[int, int], float] = {}
    for bucket in buckets:
        if bucket.kind in ("decode", "verify"):
            seconds = _seconds(runner, empty_step(bucket, lanes, no_row)) / bucket.steps
            key = bucket.rows, bucket.drafts
            found[key] = min(seconds, found.get(key, seconds))
    return Costs(found)


def _seconds(runner: Runner, plan: StepPlan) -> float:
    found = []
    for _ in range(LAUNCHES):
        began = time.perf_counter()
        runner.collect(plan, runner.launch(plan))
        found.append(time.perf_counter() - began)
    return min(found)
