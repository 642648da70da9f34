"""Drafts change the number of steps and never the output.

Tokens, log-probabilities, penalties and ends are compared.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.config import EngineOptions
from jaxserve.engine.host.prompt_lookup import PromptLookup
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.speculation import Proposer, Speculation
from jaxserve.models.spec import ModelSpec
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import (
    BASE,
    EXPERTS,
    LATENT,
    SPEC,
    WINDOWED,
    Outcome,
    distribution,
    largest_of_each_kind,
    make_engine,
    run,
)

BOUND = 1e-4
DRAFTS = 7
SPECULATING = replace(BASE, speculate="ngram", draft_tokens=DRAFTS)
Answers = dict[tuple[str, int], Outcome]


def requests(count: int = 24) -> list[Request]:
    """Make requests of every kind; some prompts share a prefix, some repeat themselves."""
    draw = random.Random(4)
    shared = [draw.randrange(SPEC.vocab_size) for _ in range(9)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "min_p": 0.02},
        {
            "temperature": 0.0,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.4,
        },
        {"temperature": 1.0, "frequency_penalty": 1.0, "n": 2},
        {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": (1, 2, 3, 4, 5)},
        {"temperature": 0.0, "stop_token_ids": (1, 7, 9)},
        {"temperature": 1.0, "logit_bias": {3: 4.0, 5: 4.0}, "allowed_token_ids": (1, 3, 5, 8, 13)},
    ]
    found = []
    for i in range(count):
        own = [draw.randrange(SPEC.vocab_size) for _ in range(draw.randrange(1, 14))]
        prompt = (*shared, *own) if i % 3 else (own * 4)[:20]
        params = SamplingParams(
            **{"max_tokens": 20, "logprobs": 20, "seed": i, "ignore_eos": True} | kinds[i % 8]
        )
        found.append(Request(id=str(i), prompt=tuple(prompt), params=params))
    return found


def answers(
    options: EngineOptions,
    mesh: MeshSpec | None = None,
    spec: ModelSpec = SPEC,
    proposer: Proposer | None = None,
) -> tuple[Answers, Speculation | None]:
    speculation = Speculation(proposer, DRAFTS) if proposer else None
    engine, runner = make_engine(options, mesh, spec=spec, speculation=speculation)
    runner.warm_up(largest_of_each_kind(runner))
    found = run(engine, [(2 * i, request) for i, request in enumerate(requests())])
    assert runner.compiles_after_ready == 0
    engine.close()
    return found, speculation


class PartlyWrongProposer:
    """Proposer that drafts a plain engine's output with a share of tokens wrong.

    The number of drafts changes in every step.
    """

    waits = True
    has_pages = False

    def __init__(self, expected: Answers, wrong: float) -> None:
        self._expected = expected
        self._wrong = wrong
        self._draw = random.Random(1)

    def takes(self, request: Request) -> bool:
        return int(request.id) % 4 != 3

    def propose(self, seq: Sequence) -> list[int]:
        known = self._expected[seq.request.id, seq.index].tokens[len(seq.tokens) - seq.prompt_len :]
        drafted = [self._spoilt(token) for token in known] + [0] * DRAFTS
        return drafted[: self._draw.randrange(DRAFTS + 1)]

    def forget(self, seq: Sequence) -> None:
        pass

    def _spoilt(self, token: int) -> int:
        return (token + 1) % SPEC.vocab_size if self._draw.random() < self._wrong else token


@pytest.fixture(scope="module")
def expected_answers() -> Answers:
    return answers(replace(BASE, max_batch=1, prefix_cache=False))[0]


def check(found: Answers, expected: Answers) -> None:
    """Check for equal tokens and ends, and log-probabilities up to float32's rounding.

    The seeds were chosen so that no choice is close.
    """
    assert found.keys() == expected.keys()
    for key, outcome in found.items():
        other = expected[key]
        assert outcome.tokens == other.tokens, key
        assert outcome.last and other.last and outcome.last.finish == other.last.finish
        for mine, theirs in zip(outcome.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(distribution(mine), distribution(theirs), atol=BOUND)


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(0.0, marks=pytest.mark.slow), 0.3, pytest.param(1.0, marks=pytest.mark.slow)],
)
def test_any_drafter(wrong: float, expected_answers: Answers) -> None:
    found, speculation = answers(SPECULATING, proposer=PartlyWrongProposer(expected_answers, wrong))
    check(found, expected_answers)
    assert speculation and speculation.drafted > 200
    assert speculation.accepted == 0 if wrong == 1 else speculation.accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        (replace(SPECULATING, step_tokens=12), MeshSpec()),
        (replace(SPECULATING, cache_tokens=80), MeshSpec()),
        (SPECULATING, MeshSpec(tensor=2)),
        (SPECULATING, MeshSpec(data=2, tensor=2)),
    ],
    ids=["chunks", "preempted", "1x1x2", "2x1x2"],
)
def test_cut_preempted_and_sharded(
    options: EngineOptions, mesh: MeshSpec, expected_answers: Answers
) -> None:
    found, _ = answers(options, mesh, proposer=PartlyWrongProposer(expected_answers, 0.3))
    check(found, expected_answers)
    preemptions = sum(
        outcome.last.times.preemptions
        for outcome in found.values()
        if outcome.last and outcome.last.times
    )
    assert (preemptions > 0) == (options.cache_tokens == 80)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [WINDOWED, EXPERTS, LATENT], ids=["windows", "experts", "latent"])
def test_other_models(spec: ModelSpec) -> None:
    expected, _ = answers(replace(BASE, max_batch=1, prefix_cache=False), spec=spec)
    found, _ = answers(SPECULATING, spec=spec, proposer=PartlyWrongProposer(expected, 0.3))
    check(found, expected)


@pytest.mark.slow
def test_prompt_lookup(expected_answers: Answers) -> None:
    found, speculation = answers(SPECULATING, proposer=PromptLookup(DRAFTS))
    check(found, expected_answers)
    assert speculation and speculation.accepted > 10
