"""A step without sequences, which computes padding alone."""

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.plan import FED_BACK, MEASURED, LanePlan, StepPlan


def empty_step(bucket: Bucket, lanes: int, no_row: int) -> StepPlan:
    """Return a step of a bucket's shape whose rows are all out of range: no state is changed.

    Args:
        no_row: Row id that is out of range.
    """
    rows = bucket.rows
    samples = 1 + bucket.drafts if bucket.kind == "verify" else 0
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
