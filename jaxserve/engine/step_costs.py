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


class StepCosts:
    """Seconds of the decode and verify steps that were measured, each by its last measurement.

    Args:
        no_row: Row id that is out of range, so that no row is changed.
    """

    def __init__(self, runner: Runner, lanes: int, no_row: int):
        self._runner = runner
        self._lanes = lanes
        self._no_row = no_row
        self._seconds: dict[Bucket, float] = {}

    @staticmethod
    def concerns(bucket: Bucket) -> bool:
        """Return whether speculation asks what this step costs."""
        return bucket.kind in ("decode", "verify")

    @property
    def measured(self) -> tuple[Bucket, ...]:
        """Buckets that were measured."""
        return tuple(self._seconds)

    def measure(self, bucket: Bucket) -> None:
        """Run a decode or verify step, which is compiled, and note its seconds."""
        plan = empty_step(bucket, self._lanes, self._no_row)
        self._seconds[bucket] = _seconds(self._runner, plan)

    @property
    def costs(self) -> Costs:
        """Costs by rows and drafted tokens.

        A decode costs its share of the launch where several are launched as one.
        """
        found: dict[tuple[int, int], float] = {}
        for bucket, seconds in self._seconds.items():
            key = bucket.rows, bucket.drafts
            found[key] = min(seconds / bucket.steps, found.get(key, seconds))
        return Costs(found)


def measure(runner: Runner, buckets: Iterable[Bucket], lanes: int, no_row: int) -> Costs:
    """Run every decode and verify step among the compiled ones and return their seconds.

    Args:
        no_row: Row id that is out of range, so that no row is changed.
    """
    costs = StepCosts(runner, lanes, no_row)
    for bucket in filter(StepCosts.concerns, buckets):
        costs.measure(bucket)
    return costs.costs


def _seconds(runner: Runner, plan: StepPlan) -> float:
    found = []
    for _ in range(LAUNCHES):
        began = time.perf_counter()
        runner.collect(plan, runner.launch(plan))
        found.append(time.perf_counter() - began)
    return min(found)
