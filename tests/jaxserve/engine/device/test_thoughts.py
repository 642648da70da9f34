"""Thoughts with a budget on the device, against a row followed token by token."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxserve.engine.device.thoughts import close_thoughts, closes_after
from jaxserve.engine.row_fields import NEVER
from jaxserve.request import ThoughtBudget
from tests.jaxserve.engine.device.sampling_rows import PLAIN, RowParams, row_sampling

OPENING, END = 1, 2
OPENED = ThoughtBudget(4, end=END, closing=(3, END, 4))
UNOPENED = replace(OPENED, opening=(OPENING,))


def test_tokens_of_random_rows() -> None:
    rng = np.random.default_rng(5)
    budgets = [OPENED, UNOPENED, None, replace(OPENED, tokens=0, closing=(END,) * 8)]
    rows = [replace(PLAIN, prompt=(9,) * int(rng.integers(1, 4)), budget=b) for b in budgets * 50]
    sampled = rng.integers(0, 6, (len(rows), 16))
    assert np.array_equal(on_the_device(rows, sampled, 1), by_hand(rows, sampled))


def test_several_tokens_at_a_time() -> None:
    """What is drafted counts as far as it was accepted; padding behind it does not."""
    rng = np.random.default_rng(6)
    rows = [replace(PLAIN, prompt=(9, 9), budget=b) for b in [OPENED, UNOPENED] * 50]
    sampled = rng.integers(0, 6, (len(rows), 16))
    assert np.array_equal(on_the_device(rows, sampled, 4), by_hand(rows, sampled))


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
        params = replace(params, closes_at=closes_after(params, tokens, positions, live))
    return found


def by_hand(rows: list[RowParams], sampled: np.ndarray) -> np.ndarray:
    return np.stack([tokens_of(row, list(each)) for row, each in zip(rows, sampled, strict=True)])


def tokens_of(row: RowParams, sampled: list[int]) -> list[int]:
    """Return the tokens of a row that would have sampled these."""
    budget = row.budget
    if budget is None or (budget.opening and sampled[0] != budget.opening[0]):
        return sampled
    first = budget.tokens + len(budget.opening)
    if budget.end in sampled[len(budget.opening) : first]:
        return sampled
    behind = first + len(budget.closing)
    return [*sampled[:first], *budget.closing, *sampled[behind:]]


def test_no_budget_is_never_reached() -> None:
    params = row_sampling([PLAIN])
    assert params.closes_at.tolist() == params.opens_at.tolist() == [NEVER]
