"""Engines with quantized experts over meshes give the tokens of one device.

Tokens are compared up to the first near-tie.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.test_families_on_meshes import answer_prompts
from tests.jaxserve.engine.tiny import Outcome

BOUND = 3e-4  # of log-probabilities; tokens whose two best are closer may change
CASES = {
    "mixtral_gqa": "int8",
    "qwen2_moe_shared_expert": "fp8",
    "qwen3_moe_gqa": "int4",
    "deepseek_v2_lite": "int4",
    "deepseek_v3_fp8": "int8",
    "gpt_oss_mxfp4": "int4-g32",
}
# data, expert, tensor
MESHES = ((1, 4, 2), (2, 1, 4), (1, 1, 2))


def cases() -> Iterator[ParameterSet]:
    """Yield one family on all meshes, and each other one on one; all by `make test-slow`.

    `make test` has the parts: quantized experts on one device, float ones on meshes.
    """
    for (i, case), (j, mesh) in product(enumerate(CASES), enumerate(MESHES)):
        if i == 0 or j == (i + 1) % 2:
            yield pytest.param(
                case, mesh, marks=pytest.mark.slow, id=f"{case}-{'x'.join(map(str, mesh))}"
            )


@cache
def answers_on_one_device(case: str) -> dict[tuple[str, int], Outcome]:
    return answer_prompts(case, MeshSpec(), CASES[case])[0]


@pytest.mark.parametrize(("case", "mesh"), list(cases()))
def test_tokens_are_those_of_one_device(case: str, mesh: tuple[int, int, int]) -> None:
    alone = answers_on_one_device(case)
    spread, _, _ = answer_prompts(case, MeshSpec(*mesh), CASES[case])
    for (name, _), outcome in spread.items():
        expected = alone[str(int(name) % 2), 0]
        assert count_equal_tokens(outcome, expected) >= len(expected.tokens) / 2


def count_equal_tokens(outcome: Outcome, expected: Outcome) -> int:
    """Count the tokens that are equal, up to a step whose two best are nearly as good.

    Log-probabilities are compared as well.
    """
    for step, (ours, theirs) in enumerate(zip(outcome.logprobs, expected.logprobs, strict=True)):
        scores = dict(ours.top)
        for token, score in theirs.top[:10]:
            assert scores[token] == pytest.approx(score, abs=BOUND)
        if theirs.top[0][1] - theirs.top[1][1] < 2 * BOUND:
            return step
        assert outcome.tokens[step] == expected.tokens[step]
    return len(expected.tokens)
