"""Engines with 8-bit pages give the tokens of a plain engine with such pages."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.errors import ConfigError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.eight_bits import rounded
from tests.jaxserve.engine import naive
from tests.jaxserve.engine.tiny import (
    BASE,
    SPEC,
    WINDOWED,
    Outcome,
    distribution,
    make_engine,
    make_params,
    run,
)
from tests.slow_cases import slow_but

# Executables differ by float32's rounding, and a key that lies between two numbers of 8 bits may
# become the other one.
ONE_STEP = {"int8": 0.05, "fp8": 0.2}
SAME = 1e-4
PLAIN = EngineOptions(
    max_batch=1, page_size=64, step_tokens=96, cache_tokens=1024, prefix_cache=False
)
Answers = dict[str, Outcome]


def requests(count: int = 16) -> list[Request]:
    """Make greedy requests whose prompts begin with one of two prefixes."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(0, SPEC.vocab_size, (2, 21)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=20)
    return [
        Request(
            id=str(i),
            prompt=(*prefixes[i % 2], *rng.integers(0, SPEC.vocab_size, 3 + i).tolist()),
            params=params,
        )
        for i in range(count)
    ]


def answers(options: EngineOptions, mesh: MeshSpec | None = None, spacing: int = 3) -> Answers:
    engine, runner = make_engine(options, mesh, spec=WINDOWED)
    held = {str(pages.k.dtype) for pages in runner.lowering.state.kept}
    # The kernel for a CPU holds float8 numbers as their bits.
    assert held <= {runner.config.page_dtype, "uint8" if options.kv == "fp8" else ""}
    warm_up(runner)
    found = run(engine, [(spacing * i, request) for i, request in enumerate(requests())])
    engine.close()
    return {name: outcome for (name, _), outcome in found.items()}


def warm_up(runner: DeviceRunner, *more: str) -> None:
    """Compile the widest step of each kind, which serves all sizes."""
    runner.warm_up(
        [
            max(b for b in runner.buckets.buckets if b.kind == kind)
            for kind in ("decode", "prefill", *more)
        ]
    )


@pytest.fixture(scope="module", params=slow_but(["int8", "fp8"], ["fp8"]))
def expected_answers(request: pytest.FixtureRequest) -> tuple[str, Answers]:
    """Return the page dtype, and answers one row at a time, prompts whole, nothing shared."""
    return request.param, answers(replace(PLAIN, kv=request.param))


@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        (BASE, MeshSpec()),
        pytest.param(replace(BASE, cache_tokens=128), MeshSpec(), marks=pytest.mark.slow),
        pytest.param(BASE, MeshSpec(tensor=2), marks=pytest.mark.slow),
        pytest.param(BASE, MeshSpec(data=2, tensor=2), marks=pytest.mark.slow),
    ],
    ids=["chunks and prefix hits", "preempted", "1x1x2", "2x1x2"],
)
def test_the_same_tokens(
    expected_answers: tuple[str, Answers], options: EngineOptions, mesh: MeshSpec
) -> None:
    kv, expected = expected_answers
    found = answers(replace(options, kv=kv), mesh, spacing=1)
    differences = np.concatenate(
        [logprob_differences(found[name], expected[name], ONE_STEP[kv]) for name in expected]
    )
    assert np.median(differences) < SAME
    assert len(differences) > 0.9 * 16 * len(expected), "and few of them end early"
    times = [outcome.last.times for outcome in found.values() if outcome.last]
    assert sum(t.cached for t in times) > 40
    assert (sum(t.preemptions for t in times) > 0) == (options.cache_tokens == 128)


def logprob_differences(one: Outcome, other: Outcome, bound: float) -> np.ndarray:
    """Return how far the log-probabilities of each step differ.

    Ends at a token that both engines chose by less than the bound.
    """
    found = []
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        scores = distribution(theirs)
        found.append(np.abs(distribution(mine) - scores).max())
        assert found[-1] < bound
        second, first = np.sort(scores)[-2:]
        if mine.token != theirs.token:
            assert first - second < 2 * bound
            break
    return np.array(found)


@pytest.mark.parametrize("kv", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_deterministic_whatever_the_load(kv: str) -> None:
    """A request has the same bits alone and among others that come and go."""
    options = replace(BASE, kv=kv, deterministic=True)
    one_by_one = answers(options, spacing=40)
    together = answers(options, spacing=1)
    for name, alone in one_by_one.items():
        assert (alone.tokens, alone.logprobs) == (together[name].tokens, together[name].logprobs)


@pytest.mark.parametrize(
    ("kv", "dtype"),
    [pytest.param("int8", "int8", marks=pytest.mark.slow), ("fp8", "float8_e4m3fn")],
)
def test_prompts_are_scored_by_what_pages_hold(kv: str, dtype: str) -> None:
    """Scores equal those of a decoder that sees rounded keys and values.

    They are far from those of a decoder that sees unrounded ones.
    """
    weights = naive.to_numpy(make_params(MeshSpec().build(jax.devices()), spec=WINDOWED))
    engine, runner = make_engine(replace(BASE, kv=kv), spec=WINDOWED)
    warm_up(runner, "score")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20)
    asked = [replace(request, params=params) for request in requests(8)]
    found = run(engine, [(0, request) for request in asked])
    off: dict[bool, list[float]] = {True: [], False: []}
    for request in asked:
        scored = np.stack([distribution(entry) for entry in found[request.id, 0].prompt_logprobs])
        for eight_bits, kept in ((True, partial(rounded, dtype=dtype)), (False, lambda x: x)):
            logits = naive.forward(weights, WINDOWED, list(request.prompt), kept)[:-1]
            expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            off[eight_bits].append(float(np.abs(scored - expected).mean()))
    assert np.mean(off[True]) < 0.02 * np.mean(off[False]), off


def test_auto_is_the_dtype_of_the_weights() -> None:
    def page_dtype(asked: str, weights: str) -> str:
        return resolve(
            EngineOptions(kv=asked),
            max_positions=64,
            lanes=1,
            affordable_tokens=1024,
            weights=weights,
        ).page_dtype

    assert [page_dtype("auto", weights) for weights in ("float32", "bfloat16")] == [
        "float32",
        "bfloat16",
    ]
    assert page_dtype("bfloat16", "float32") == "bfloat16"
    assert page_dtype("fp8", "bfloat16") == "float8_e4m3fn"
    with pytest.raises(
        ConfigError, match=r"--kv is int4; choose one of auto, float32, bfloat16, int8, fp8$"
    ):
        page_dtype("int4", "float32")
    with pytest.raises(
        ConfigError,
        match="--kv is float32; keys and values of bfloat16 weights have no more digits",
    ):
        page_dtype("float32", "bfloat16")


@pytest.mark.parametrize(
    ("kv", "size"), [("auto", 64), ("bfloat16", 64), ("int8", 128), ("fp8", 128)]
)
def test_pages_of_8_bits_are_longer(kv: str, size: int) -> None:
    def page_size(options: EngineOptions) -> int:
        return resolve(options, max_positions=512, lanes=1, affordable_tokens=1024).page_size

    assert page_size(EngineOptions(kv=kv)) == size
    assert page_size(EngineOptions(kv=kv, page_size=32)) == 32
