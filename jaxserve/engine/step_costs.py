"""How long steps take whose rows hold nothing: what decodes and verifications cost beside the
reading of pages.
"""

import time
from collections.abc import Iterable
from typing import Any, Final

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.engine import Runner
from jaxserve.engine.host.speculation import Costs
from jaxserve.engine.plan import FED_BACK, MEASURED, LanePlan, StepPlan

LAUNCHES: Final = 4  # of each step, of which the fastest counts


def measure(runner: Runner, buckets: Iterable[Bucket], lanes: int, no_row: int) -> Costs:
    """Of every decode and verify step among the compiled ones. no_row: a row id that is out of
    range.

    Where several decodes are launched as one, a decode costs its share of that.
    """
    found: dict[tuple[int, int], float] = {}
    for b in buckets:
        if b.kind in ("decode", "verify"):
            seconds = _seconds(runner, _idle(b, lanes, no_row)) / b.steps
            found[b.rows, b.drafts] = min(seconds, found.get((b.rows, b.drafts), seconds))
    return Costs(found)


def _seconds(runner: Runner, plan: StepPlan) -> float:
    found = []
    for _ in range(LAUNCHES):
        began = time.perf_counter()
        handle: Any = runner.launch(plan)
        runner.collect(plan, handle)
        found.append(time.perf_counter() - began)
    return min(found)


def _idle(bucket: Bucket, lanes: int, no_row: int) -> StepPlan:
    """Rows that are none, for as long as the step can be."""
    rows, samples = bucket.rows, 1 + bucket.drafts if bucket.kind == "verify" else 0
    lane = LanePlan(
        sequences=[0] * rows,
        rows=[no_row] * rows,
        starts=[0] * rows,
        sizes=[0] * rows,
        samples=[samples] * rows,
        tokens=[FED_BACK] * bucket.tokens,
        targets=[0] * bucket.tokens,
    )
    return StepPlan(MEASURED, bucket.kind, (lane,) * lanes, (), bucket.steps)
