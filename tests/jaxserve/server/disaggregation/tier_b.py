"""Tier (b) of the promise that requests do not affect each other, between two servers."""

import numpy as np

from jaxserve.completion import Completion
from jaxserve.engine.events import Logprob
from jaxserve.request import Request
from tests.jaxserve.engine import naive
from tests.jaxserve.engine.tiny import distribution
from tests.jaxserve.letters import VOCAB


def check(found: Completion, expected: Completion, request: Request, bound: float) -> int:
    """Check that tokens agree up to a close choice, and log-probabilities within the bound.

    Returns how many tokens were compared. `expected` answers `request`, and has the
    log-probabilities of the whole vocabulary.
    """
    assert expected.logprobs and (found.index, found.seed) == (expected.index, expected.seed)
    for step, (token, truth) in enumerate(zip(found.token_ids, expected.logprobs, strict=False)):
        if found.logprobs:
            check_scores(found.logprobs[step], distribution(truth), bound)
        gap = lead(expected, request, step)
        assert gap > -bound, (
            f"{request.id}[{found.index}], step {step}: the gap is not that of the choice"
        )
        if token != truth.token:
            assert gap < bound, (
                f"{request.id}[{found.index}], step {step}: {token} instead of {truth.token}, "
                f"gap {gap}"
            )
            return step
    assert ending(found) == ending(expected)
    return len(expected.token_ids)


def check_scores(found: Logprob, expected: np.ndarray, bound: float) -> None:
    for token, score in ((found.token, found.logprob), *found.top):
        assert abs(score - expected[token]) < bound, (
            f"token {token}: {score} instead of {expected[token]}"
        )


def ending(completion: Completion) -> tuple[object, ...]:
    return (
        len(completion.token_ids),
        completion.text,
        completion.finish_reason,
        completion.stopped_by,
    )


def lead(expected: Completion, request: Request, step: int) -> float:
    """Return how far the token of a step was ahead of the next best allowed one.

    Penalties and noise are included. Log-probabilities stand in for logits, which only a repetition
    penalty would tell apart.
    """
    assert expected.logprobs and request.params.repetition_penalty == 1
    token = expected.token_ids[step]
    before = expected.token_ids[:step]
    logits = np.where(
        allowed(request, before), distribution(expected.logprobs[step]).astype(np.float64), -np.inf
    )
    values = naive.process(
        logits, request, [*request.prompt, *before], expected.seed, expected.index
    )
    return float(values[token] - np.delete(values, token).max())


def allowed(request: Request, output: tuple[int, ...]) -> np.ndarray:
    """Return the tokens that may come next, bool [V]."""
    if request.grammar is None:
        return np.ones(VOCAB, bool)
    matcher = request.grammar.matcher()
    assert all(map(matcher.accept, output))
    mask = np.frombuffer(matcher.masks()[0], np.uint8)
    return np.unpackbits(mask, bitorder="little")[:VOCAB].astype(bool)
