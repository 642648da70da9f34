"""Engines with all features on, against a loop without cache.

Neighbours in a batch may change log-probabilities by rounding only, see BOUND.
"""

from dataclasses import dataclass, replace
from threading import Semaphore

import jax
import numpy as np
import pytest

from jaxserve.config import EngineOptions
from jaxserve.engine.buckets import required
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.events import TokenEvent
from jaxserve.models.spec import ModelSpec
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding import params
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine import naive
from tests.jaxserve.engine.tiny import (
    BASE,
    SPEC,
    WINDOWED,
    Outcome,
    distribution,
    largest_of_each_kind,
    make_engine,
    make_params,
    run,
)
from tests.slow_cases import slow_but

BOUND = 1e-4
EOS = (3,)


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Draw sampling parameters that use processors alone and together."""

    def sometimes(value: object, otherwise: object, share: float = 0.3) -> object:
        return value if rng.random() < share else otherwise

    vocab = SPEC.vocab_size
    fields = dict(
        temperature=sometimes(0.0, float(rng.uniform(0.3, 1.5)), 0.5),
        top_k=sometimes(int(rng.integers(1, vocab)), 0),
        top_p=sometimes(float(rng.uniform(0.3, 0.99)), 1.0),
        min_p=sometimes(float(rng.uniform(0.01, 0.3)), 0.0),
        repetition_penalty=sometimes(float(rng.uniform(0.8, 1.6)), 1.0),
        presence_penalty=sometimes(float(rng.uniform(-1, 2)), 0.0),
        frequency_penalty=sometimes(float(rng.uniform(-1, 2)), 0.0),
        logit_bias=sometimes(
            {int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, vocab, 3)}, {}
        ),
        allowed_token_ids=sometimes(
            tuple(int(t) for t in {*rng.integers(4, vocab, 8)} | {3}), None
        ),
        seed=int(rng.integers(0, 2**63)),
        stop_token_ids=sometimes((int(rng.integers(4, vocab)),), ()),
        ignore_eos=bool(sometimes(True, False)),
        min_tokens=int(sometimes(int(rng.integers(1, 6)), 0)),
        max_tokens=int(rng.integers(6, 24)),
        n=int(sometimes(2, 1, 0.15)),
        logprobs=20,
        prompt_logprobs=sometimes(20, None, 0.2),
    )
    return SamplingParams(**fields)  # type: ignore[arg-type]


def random_requests(seed: int, count: int) -> list[tuple[int, Request]]:
    """Return requests with arrival steps; half of the prompts begin with a common prefix."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, SPEC.vocab_size, 21).tolist() for _ in range(2)]
    requests = []
    for i in range(count):
        shared = prefixes[rng.integers(0, 2)] if rng.random() < 0.5 else []
        prompt = shared + rng.integers(0, SPEC.vocab_size, rng.integers(1, 45)).tolist()
        params = random_params(rng)
        priority = int(rng.integers(0, 3))
        request = Request(
            id=f"r{i}", prompt=tuple(prompt), params=params, eos_ids=EOS, priority=priority
        )
        requests.append((int(rng.integers(0, 60)), request))
    return requests


def requests_for_interpreters() -> list[tuple[int, Request]]:
    """Return requests with arrival steps that have every kind of chunk in a few launches.

    Interpreted kernels are slow. A prompt of three chunks that begins a second page of 64, with its
    log-probabilities; a short one that arrives meanwhile; two tokens of each.
    """
    rng = np.random.default_rng(5)
    long = tuple(rng.integers(0, SPEC.vocab_size, 70).tolist())
    short = tuple(rng.integers(0, SPEC.vocab_size, 9).tolist())
    common = {"max_tokens": 2, "logprobs": 20, "ignore_eos": True}
    scored = SamplingParams(temperature=0.0, prompt_logprobs=20, seed=1, **common)  # type: ignore[arg-type]
    drawn = SamplingParams(temperature=0.8, top_k=7, seed=2, **common)  # type: ignore[arg-type]
    return [
        (0, Request(id="long", prompt=long, params=scored)),
        (2, Request(id="short", prompt=short, params=drawn)),
    ]


Answers = dict[tuple[str, int], naive.Answer]


def oracle_answers(spec: ModelSpec) -> Answers:
    """Compute the expected answers to the 64 requests that every engine below gets."""
    weights = naive.to_numpy(make_params(MeshSpec().build(jax.devices()), spec=spec))
    found = {}
    for _, request in random_requests(0, 64):
        for i in range(request.params.n):
            p = request.params
            found[request.id, i] = naive.generate(
                weights, spec, request, p.seed or 0, i, p.max_tokens or 0
            )
    return found


@pytest.fixture(scope="module")
def answers() -> Answers:
    return oracle_answers(SPEC)


@pytest.fixture(scope="module")
def windowed_answers() -> Answers:
    return oracle_answers(WINDOWED)


def check(
    outcome: Outcome, answer: naive.Answer, request: Request, index: int, bound: float = BOUND
) -> None:
    """Check log-probabilities, and tokens up to a step whose best two are closer than the bound."""
    for step, (token, expected, gap) in enumerate(
        zip(outcome.tokens, answer.tokens, answer.gaps, strict=False)
    ):
        np.testing.assert_allclose(
            distribution(outcome.logprobs[step]), answer.scores[step], atol=bound
        )
        if gap < bound and token != expected:
            return
        assert token == expected, f"{request.id}[{index}] step {step}, gap {gap}"
        assert outcome.logprobs[step].token == token
    assert len(outcome.tokens) == len(answer.tokens)
    assert outcome.last is not None and outcome.last.finish is not None
    assert outcome.last.finish.reason == answer.finish
    if request.params.prompt_logprobs is not None and index == 0:
        assert [entry.token for entry in outcome.prompt_logprobs] == list(request.prompt[1:])
        for entry, expected_scores in zip(
            outcome.prompt_logprobs, answer.prompt_scores, strict=True
        ):
            np.testing.assert_allclose(distribution(entry), expected_scores, atol=bound)
            np.testing.assert_allclose(entry.logprob, expected_scores[entry.token], atol=bound)


@dataclass
class RunCounts:
    """Counts of a run over the 64 requests."""

    preemptions: int
    cached_tokens: int


def run_and_check(
    options: EngineOptions,
    answers: Answers,
    mesh: MeshSpec | None = None,
    spec: ModelSpec = SPEC,
    all_buckets: bool = False,
) -> RunCounts:
    engine, runner = make_engine(options, mesh, spec)
    runner.warm_up(runner.buckets.buckets if all_buckets else largest_of_each_kind(runner))
    arrivals = random_requests(0, 64)
    outcomes = run(engine, arrivals)
    for _, request in arrivals:
        for i in range(request.params.n):
            check(outcomes[request.id, i], answers[request.id, i], request, i)
    assert runner.compiles_after_ready == 0
    unused = [str(bucket) for bucket, use in runner.padding.items() if use.launches == 0]
    together = sum(use.launches for bucket, use in runner.padding.items() if bucket.steps > 1)
    # Decodes in twos and threes are rarely alone: with several as one, no traffic of this kind
    # meets all their buckets.
    assert together > 10 if options.decode_steps else not unused, (
        "this run is meant to visit every bucket"
    )
    engine.close()
    times = [outcome.last.times for outcome in outcomes.values() if outcome.last]
    return RunCounts(sum(t.preemptions for t in times), sum(t.cached for t in times))


class ComingSteps:
    """Steps that a runner compiles while its engine runs, one in use before every fourth step."""

    def __init__(self, engine: Engine, runner: DeviceRunner):
        self._engine = engine
        self._runner = runner
        self._step = engine.step
        self._steps = 0
        self._compiled = Semaphore(0)
        runner.warm_up(required(runner.buckets.buckets))
        runner.compile_in_background(runner.buckets.buckets, lambda *_: self._compiled.release())
        self._tell()

    def step(self) -> list[TokenEvent]:
        self._steps += 1
        if self._steps % 4 == 0 and self._runner.buckets_pending:
            assert self._compiled.acquire(timeout=60)
            self._runner.install()
            self._tell()
        return self._step()

    def _tell(self) -> None:
        several = [bucket.rows for bucket in self._runner.compiled if bucket.steps > 1]
        self._engine.set_rows_of_several_decodes(max(several, default=0))


@pytest.mark.parametrize("decode_steps", slow_but([1, 3], [3]))
def test_steps_that_come_while_it_runs(
    answers: Answers, decode_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger steps serve until then, and nothing that runs sees a difference."""
    engine, runner = make_engine(replace(BASE, decode_steps=decode_steps))
    monkeypatch.setattr(runner, "empty_launches", 2)
    coming = ComingSteps(engine, runner)
    monkeypatch.setattr(engine, "step", coming.step)
    first = set(runner.compiled)
    arrivals = random_requests(0, 64)
    outcomes = run(engine, arrivals)
    for _, request in arrivals:
        for i in range(request.params.n):
            check(outcomes[request.id, i], answers[request.id, i], request, i)
    assert runner.compiles_after_ready == 0 and runner.buckets_pending == 0
    assert runner.background_compiles == len(runner.buckets.buckets) - len(first)
    used = {bucket for bucket, use in runner.padding.items() if use.launches}
    assert used & first and used - first
    engine.close()


def test_chunked_cached_overlapped(answers: Answers) -> None:
    """Prompts have up to 65 tokens and a budget of 32, share prefixes, and arrive meanwhile."""
    done = run_and_check(BASE, answers, all_buckets=True)
    assert done.cached_tokens > 100
    assert done.preemptions == 0


def test_several_decodes_as_one(answers: Answers) -> None:
    """Rows end by a token, by their length, or not at all among the decodes of a launch."""
    run_and_check(replace(BASE, decode_steps=3), answers, all_buckets=True)


def test_preempted(answers: Answers) -> None:
    """The pool has room for one and a half sequences."""
    done = run_and_check(replace(BASE, cache_tokens=128), answers)
    assert done.preemptions > 5


@pytest.mark.slow
def test_without_prefix_cache(answers: Answers) -> None:
    done = run_and_check(replace(BASE, prefix_cache=False), answers)
    assert done.cached_tokens == 0


@pytest.mark.slow
def test_other_buckets(answers: Answers) -> None:
    options = replace(BASE, max_batch=3, step_tokens=48, page_size=16)
    run_and_check(options, answers, all_buckets=True)


@pytest.mark.slow
def test_deterministic_mode_gives_the_same_answers(answers: Answers) -> None:
    run_and_check(replace(BASE, deterministic=True), answers)


@pytest.mark.slow
def test_tensor_parallel(answers: Answers) -> None:
    run_and_check(BASE, answers, MeshSpec(tensor=2))


@pytest.mark.slow
def test_weights_in_a_tpu_s_memory_order(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params, "REORDERED", {"cpu"})
    run_and_check(replace(BASE, decode_steps=3), answers, MeshSpec(tensor=2))


@pytest.mark.slow
def test_data_parallel_lanes(answers: Answers) -> None:
    run_and_check(BASE, answers, MeshSpec(data=2))


def test_two_page_groups_with_prefix_hits(windowed_answers: Answers) -> None:
    """One layer sees 7 tokens, in pages of 4, and the other one sees all."""
    done = run_and_check(BASE, windowed_answers, spec=WINDOWED)
    assert done.cached_tokens > 100 and done.preemptions == 0


@pytest.mark.slow
def test_two_page_groups_over_lanes_and_shards_with_several_decodes_as_one(
    windowed_answers: Answers,
) -> None:
    run_and_check(
        replace(BASE, decode_steps=3), windowed_answers, MeshSpec(data=2, tensor=2), spec=WINDOWED
    )


@pytest.mark.slow
def test_two_page_groups_preempted(windowed_answers: Answers) -> None:
    done = run_and_check(replace(BASE, cache_tokens=128), windowed_answers, spec=WINDOWED)
    assert done.preemptions > 5


@pytest.mark.slow
def test_two_page_groups_deterministic(windowed_answers: Answers) -> None:
    run_and_check(replace(BASE, deterministic=True), windowed_answers, spec=WINDOWED)


@pytest.mark.slow
def test_two_page_groups_over_two_lanes_and_two_shards(windowed_answers: Answers) -> None:
    run_and_check(BASE, windowed_answers, MeshSpec(data=2, tensor=2), spec=WINDOWED)


@pytest.mark.slow
def test_lanes_over_two_axes_of_the_mesh(answers: Answers) -> None:
    """A model without experts takes the expert axis as it takes the data axis."""
    run_and_check(BASE, answers, MeshSpec(data=1, expert=2, tensor=2))
