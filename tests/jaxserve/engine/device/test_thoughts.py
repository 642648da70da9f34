"""Thoughts with a budget on the device, against a row followed token by token."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxserve.engine.device.thoughts import close_thoughts, closes_after, thoughts_after
from jaxserve.engine.row_fields import NEVER
from jaxserve.request import ThoughtBudget
from tests.jaxserve.engine.device.sampling_rows import PLAIN, RowParams, row_sampling

OPENING, END, GAP = 1, 2, 5
OPENED = ThoughtBudget(4, end=END, closing=(3, END, 4))
UNOPENED = replace(OPENED, opening=(OPENING,))
TWO = replace(OPENED, opening=(OPENING, 0))
LATER = replace(TWO, gap=GAP)


def test_tokens_of_random_rows() -> None:
    rng = np.random.default_rng(5)
    at_once = replace(OPENED, tokens=0, closing=(END,) * 8)
    budgets = [OPENED, UNOPENED, TWO, LATER, None, at_once]
    rows = [replace(PLAIN, prompt=(9,) * int(rng.integers(1, 4)), budget=b) for b in budgets * 80]
    sampled = opened(rng.integers(0, 6, (len(rows), 16)), rng)
    found = by_hand(rows, sampled)
    assert sum(map(is_closed, found)) > 100
    assert np.array_equal(on_the_device(rows, sampled, 1), found)


def test_several_tokens_at_a_time() -> None:
    """What is drafted counts as far as it was accepted; padding behind it does not.

    The first token of an output is never drafted, and so nor is one that stands before a thought.
    """
    rng = np.random.default_rng(6)
    rows = [replace(PLAIN, prompt=(9, 9), budget=b) for b in [OPENED, UNOPENED, TWO] * 80]
    sampled = opened(rng.integers(0, 6, (len(rows), 16)), rng)
    assert np.array_equal(on_the_device(rows, sampled, 4), by_hand(rows, sampled))


def opened(sampled: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Let most rows begin with a thought, and half of these with a gap before it."""
    for row in sampled[: 3 * len(sampled) // 4]:
        gap = [GAP] * int(rng.integers(2))
        row[: len(gap) + 2] = [*gap, OPENING, 0]
    rng.shuffle(sampled)
    return sampled


def is_closed(tokens: np.ndarray) -> bool:
    return any(tokens[i : i + 3].tolist() == [3, END, 4] for i in range(4, 9))


def on_the_device(rows: list[RowParams], sampled: np.ndarray, width: int) -> np.ndarray:
    """Return the tokens of rows, `width` of them told to the device at a time."""
    params = row_sampling(rows)
    begin = np.array([len(row.prompt) for row in rows])
    found = np.zeros_like(sampled)
    for first in range(0, sampled.shape[1], width):
        for n in range(first, first + width):
            index = np.arange(width)
            closes_at = closes_after(
                params,
                jnp.asarray(found[:, first : first + width]),
                jnp.asarray(begin[:, None] + first + index),
                jnp.broadcast_to(index < n - first, (len(rows), width)),
            )
            found[:, n] = close_thoughts(sampled[:, n], params.closing, closes_at, begin + n)
        positions = begin[:, None] + first + np.arange(width)
        live = jnp.ones((len(rows), width), bool)
        tokens = jnp.asarray(found[:, first : first + width])
        params = thoughts_after(params, tokens, positions, live)
    return found


def by_hand(rows: list[RowParams], sampled: np.ndarray) -> np.ndarray:
    return np.stack([tokens_of(row, list(each)) for row, each in zip(rows, sampled, strict=True)])


def tokens_of(row: RowParams, sampled: list[int]) -> list[int]:
    """Return the tokens of a row that would have sampled these."""
    budget = row.budget
    if budget is None:
        return sampled
    begin = int(budget.gap == sampled[0])
    first = begin + len(budget.opening)
    if tuple(sampled[begin:first]) != budget.opening:
        return sampled
    last = first + budget.tokens
    if budget.end in sampled[first:last]:
        return sampled
    return [*sampled[:last], *budget.closing, *sampled[last + len(budget.closing) :]]


def test_no_budget_is_never_reached() -> None:
    params = row_sampling([PLAIN])
    assert params.closes_at.tolist() == params.opens_at.tolist() == [NEVER]
