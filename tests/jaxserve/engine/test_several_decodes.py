"""Several decodes in one launch give what the same decodes give one by one."""

from typing import Any

import numpy as np
import pytest

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.plan import Admission, LaneOutput, LanePlan, StepPlan
from jaxserve.errors import EngineError
from tests.jaxserve.engine.test_isolation import PROMPTS, admission, lane_plan
from tests.jaxserve.engine.tiny import BASE, distribution, make_engine

ROWS = [0, 1, 2]
BOUND = 1e-4


@pytest.fixture(scope="module")
def runner():
    engine, runner = make_engine(BASE)
    runner.warm_up(
        [Bucket("decode", 4, 4), Bucket("decode", 4, 4, steps=4), Bucket("prefill", 4, 32)]
    )
    yield runner
    engine.close()


def run_prompts(runner: DeviceRunner, admissions: list[Admission]) -> LaneOutput:
    """Run the step that computes the prompts."""
    sizes = [len(PROMPTS[row]) for row in ROWS]
    prompts = lane_plan(ROWS, ROWS, sizes, [token for row in ROWS for token in PROMPTS[row]])
    prompts.put_single_tokens_first()
    return collect(runner, StepPlan(1, "prefill", (prompts,), tuple(admissions)))


def decode(runner: DeviceRunner, sizes: list[int], steps: int) -> LaneOutput:
    rows = [row for row, size in zip(ROWS, sizes, strict=True) if size]
    count = [size for size in sizes if size]
    starts = [0] * len(rows)
    plan = LanePlan(
        rows, rows, starts, count, count, [-1] * sum(count), [0] * sum(count), [], logprobs=True
    )
    return collect(runner, StepPlan(2, "decode", (plan,), (), steps))


def collect(runner: DeviceRunner, plan: StepPlan) -> LaneOutput:
    return runner.collect(plan, runner.launch(plan)).lanes[0]


def test_rows_end_by_a_token_by_their_size_or_not_at_all(runner: DeviceRunner) -> None:
    """Decodes after an end leave no trace: later launches go on as if decoded one by one."""
    changes: dict[str, Any] = {"allowed_token_ids": None, "min_tokens": 0}
    plain = [admission(row, row, 1, stop_token_ids=(), **changes) for row in ROWS]
    run_prompts(runner, plain)
    single = [decode(runner, [1, 1, 1], 1) for _ in range(8)]
    expected = [[step.tokens[row][0] for step in single] for row in ROWS]
    end = expected[0][1]
    assert expected[0][0] != end, "choose another seed: row 0 would end at once"

    run_prompts(runner, [admission(0, 0, 1, stop_token_ids=(end,), **changes), *plain[1:]])
    first = decode(runner, [4, 2, 4], 4)
    assert first.tokens == [expected[0][:2], expected[1][:2], expected[2][:4]] and all(first.finite)
    second = decode(runner, [0, 4, 3], 4)
    assert second.tokens == [expected[1][2:6], expected[2][4:7]]
    assert first.logprobs is not None and second.logprobs is not None
    for row, entries in (
        (1, first.logprobs[1] + second.logprobs[0]),
        (2, first.logprobs[2] + second.logprobs[1]),
    ):
        for step, entry in zip(single, entries, strict=False):
            assert step.logprobs is not None
            np.testing.assert_allclose(
                distribution(entry), distribution(step.logprobs[row][0]), atol=BOUND
            )


def test_an_end_token_before_min_tokens_does_not_end(runner: DeviceRunner) -> None:
    """Only end tokens are allowed, so they come before they may end anything."""
    only = admission(0, 0, 1, stop_token_ids=(0,), allowed_token_ids=(0,), min_tokens=3)
    others = [admission(row, row, 1) for row in ROWS[1:]]
    run_prompts(runner, [only, *others])
    assert decode(runner, [4, 1, 1], 4).tokens[0] == [0, 0, 0], (
        "the prompt's step gave the first, the fourth ends"
    )


@pytest.mark.parametrize(
    ("sizes", "samples", "steps"), [([5, 1, 1], [5, 1, 1], 4), ([2], [1], 4), ([2], [2], 1)]
)
def test_a_plan_that_does_not_fit_is_refused(
    runner: DeviceRunner, sizes: list[int], samples: list[int], steps: int
) -> None:
    rows = ROWS[: len(sizes)]
    plan = LanePlan(
        rows, rows, [0] * len(rows), sizes, samples, [-1] * sum(sizes), [0] * sum(sizes)
    )
    with pytest.raises(EngineError, match=f"a decode step of {steps} was given rows of"):
        runner.launch(StepPlan(3, "decode", (plan,), (), steps))
