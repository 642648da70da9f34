"""A row does not feel its neighbours, and --deterministic means bit for bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.host.plan_builder import admission_of
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.plan import Admission, LaneOutput, LanePlan, StepPlan
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.jaxserve.engine.tiny import (
    BASE,
    EXPERTS,
    LATENT,
    SPEC,
    WINDOWED,
    distribution,
    make_engine,
    run,
)
from tests.slow_cases import slow_but

PROMPTS = [
    [5, 1, 7, 7, 2, 9, 0, 4, 11],
    [8, 8, 3],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    [19],
]


KINDS = {
    "one page group": SPEC,
    "two page groups": WINDOWED,
    "experts": EXPERTS,
    "latent pages": LATENT,
}


@pytest.fixture(scope="module", params=slow_but(list(KINDS), ("two page groups", "latent pages")))
def runner(request: pytest.FixtureRequest):
    """Make a runner with the largest bucket of each kind.

    Every arrangement of rows then runs the same executable.
    """
    engine, runner = make_engine(BASE, spec=KINDS[request.param])
    runner.warm_up(
        [Bucket("decode", 4, 4), Bucket("decode", 4, 4, steps=3), Bucket("prefill", 4, 32)]
    )
    yield runner
    engine.close()


IDLE = SamplingParams(logprobs=20, stop_token_ids=(3,))
BUSY = replace(
    IDLE,
    top_k=5,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    min_tokens=3,
    logit_bias={4: 2.0},
    allowed_token_ids=tuple(range(1, 18)),
)


def admission(row: int, number: int, groups: int, **changes: Any) -> Admission:
    """Make an admission whose pages are its own: 5 s and on for sequence s, in any row.

    All sequences but 0 use every optional feature. changes: of their sampling parameters.
    """
    prompt = PROMPTS[number]
    params = replace(BUSY if number else IDLE, **changes)
    request = Request(id="", prompt=tuple(prompt), params=params)
    seq = Sequence(number, request, number, seed=number, max_tokens=1)
    seq.tokens = list(prompt)
    seq.pages = [list(range(5 * number, 5 * number + 5))] * groups
    seq.lane = 0
    seq.row = row
    return admission_of(seq)


def run_arrangement(
    runner: DeviceRunner, order: list[int], rows: list[int], together: int = 1
) -> dict[int, list[tuple[int, bytes]]]:
    """Run a prefill and six decodes of these sequences in this order and these rows.

    Returns token and bits per step. together: decodes per launch.
    """
    groups = len(runner.config.pools)
    admissions = tuple(admission(row, s, groups) for row, s in zip(rows, order, strict=True))
    sizes = [len(PROMPTS[s]) for s in order]
    tokens = [token for s in order for token in PROMPTS[s]]
    seen: dict[int, list[tuple[int, bytes]]] = {s: [] for s in order}
    prompts = lane_plan(order, rows, sizes, tokens)
    prompts.put_single_tokens_first()
    plan = StepPlan(1, "prefill", (prompts,), admissions)
    for launch in range(1 + 6 // together):
        output = runner.collect(plan, runner.launch(plan)).lanes[0]
        record(seen, plan.lanes[0].sequences, output)
        decodes = lane_plan(
            order, rows, [together] * len(order), [-1] * together * len(order), together
        )
        plan = StepPlan(launch + 2, "decode", (decodes,), (), together)
    return seen


def lane_plan(
    order: list[int], rows: list[int], sizes: list[int], tokens: list[int], samples: int = 1
) -> LanePlan:
    columns = [
        list(column) for column in (order, rows, [0] * len(order), sizes, [samples] * len(order))
    ]
    return LanePlan(*columns, tokens, [0] * len(tokens), [], logprobs=True)


def record(seen: dict[int, list[tuple[int, bytes]]], order: list[int], output: LaneOutput) -> None:
    assert output.logprobs is not None and all(output.finite)
    for i, sequence in enumerate(order):
        seen[sequence] += [
            (token, distribution(entry).tobytes())
            for token, entry in zip(output.tokens[i], output.logprobs[i], strict=True)
        ]


@pytest.mark.parametrize("decodes", [1, 3])
def test_a_row_does_not_feel_its_neighbours(runner: DeviceRunner, decodes: int) -> None:
    """Distributions are bit-identical in any subset, order and row of the same bucket."""
    together = run_arrangement(runner, [0, 1, 2, 3], [0, 1, 2, 3], decodes)
    assert len({bits for _, bits in together[0]}) > 1, (
        "the model says the same thing whatever happens"
    )
    assert max(map(len, together.values())) == 7
    arrangements = [
        ([0], [0]),
        ([0], [3]),
        ([3, 0], [1, 2]),
        ([2, 1, 0], [0, 3, 1]),
        ([3, 2, 1, 0], [3, 2, 1, 0]),
        ([1, 3], [2, 0]),
    ]
    for order, rows in arrangements:
        for sequence, steps in run_arrangement(runner, order, rows, decodes).items():
            assert steps == together[sequence], f"sequence {sequence} in order {order}, rows {rows}"


def seeded_requests(count: int) -> list[tuple[int, Request]]:
    rng = np.random.default_rng(3)
    common = rng.integers(0, SPEC.vocab_size, 20).tolist()
    requests = []
    for i in range(count):
        prompt = (common if i % 2 else []) + rng.integers(
            0, SPEC.vocab_size, int(rng.integers(1, 40))
        ).tolist()
        params = SamplingParams(
            temperature=1.2,
            top_p=0.95,
            frequency_penalty=0.3,
            seed=i,
            max_tokens=20,
            logprobs=20,
            ignore_eos=True,
        )
        requests.append(
            (int(rng.integers(0, 12)), Request(id=f"r{i}", prompt=tuple(prompt), params=params))
        )
    return requests


@pytest.mark.parametrize(
    "kind", ["one page group", pytest.param("latent pages", marks=pytest.mark.slow)]
)
def test_deterministic_mode_is_bit_identical_whatever_the_load(kind: str) -> None:
    """Load, arrival times and prefix hits change no bit: alone, among 7 and among 16."""
    options = replace(BASE, max_batch=16, deterministic=True, cache_tokens=4096)
    requests = seeded_requests(16)
    engines = [
        make_engine(replace(options, prefix_cache=cache), spec=KINDS[kind])
        for cache in (False, True)
    ]
    for _, runner in engines:
        runner.warm_up(runner.buckets.buckets)

    def outcomes(some: list[tuple[int, Request]], prefix_cache: bool = True) -> dict[str, list]:
        engine, _ = engines[prefix_cache]
        engine.scheduler.flush_cache()
        done = run(engine, some)
        assert (
            sum(o.last.times.cached for o in done.values() if o.last) > 0
            or not prefix_cache
            or len(some) == 1
        )
        return {
            key[0]: [(entry.token, distribution(entry).tobytes()) for entry in o.logprobs]
            for key, o in done.items()
        }

    everyone = outcomes(requests)
    assert outcomes(requests[:7]) == {key: everyone[key] for key in list(everyone)[:7]}
    assert outcomes(requests, prefix_cache=False) == everyone
    assert outcomes([(0, r) for _, r in reversed(requests)]) == everyone
    for alone in requests[:3]:
        assert outcomes([alone]) == {alone[1].id: everyone[alone[1].id]}
    for engine, _ in engines:
        engine.close()
