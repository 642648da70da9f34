"""Kernels of the gated delta rule keep the contract in prompts, in Pallas's interpreters.

Against numpy in float64, which follows one sequence at a time. On a GPU the Hopper kernels run.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.gated_delta import chunked
from jaxserve.pallas_kernels.gated_delta.api import Advanced, Heads, Options
from jaxserve.pallas_kernels.short_convolution.api import Chunks
from tests.pallas_kernels.delta_case import Sizes, expected, random_sequence, states_of, step
from tests.pallas_kernels.delta_kernels import (
    BOUND,
    KERNELS,
    SLOTS,
    as_numpy,
    interpreted,
    unchanged,
)
from tests.slow_cases import slow_but

SIZE = Sizes(1, 2, 128, 128)
MANY = Sizes(2, 2, 128, 128)
KEYS = 8  # that repeat

pytestmark = pytest.mark.kernels


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Interpret a kernel in this block, and look for races."""
    with interpreted(request.param, monkeypatch):
        yield request.param


def options() -> Options:
    return Options(jax.devices()[0].device_kind)


@pytest.fixture
def prefill(kernel: str) -> Callable[..., Advanced]:
    """Return a step of prompts, with rows of one token beside them."""

    def advance(*operands: Any) -> Advanced:
        return chunked.advance(*operands, None, KERNELS[kernel], options())

    return jax.jit(advance, donate_argnums=2)


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        pytest.param(kernel, sizes, marks=marks, id=f"{kernel}-{sizes}")
        for kernel, sizes, marks in (
            ("tpu", MANY, ()),
            ("tpu", Sizes(1, 1, 128, 256), ()),
            ("gpu", MANY, pytest.mark.slow),
            ("gpu", Sizes(1, 1, 128, 256), ()),
        )
    ],
    indirect=["kernel"],
)
def test_prompts_of_all_lengths(prefill: Callable[..., Advanced], sizes: Sizes) -> None:
    """Prompts begin empty, and go on from their slots, beside a row of one token."""
    lengths = (130, 1, 7, 271)
    asked = [random_sequence(seed, length, sizes) for seed, length in enumerate(lengths)]
    slots = [4, 0, 11, 2]
    empty = states_of(np.nan, sizes, SLOTS)
    before = as_numpy(empty)
    begun = [each.part(0, -(-len(each.inputs) // 2)) for each in asked]
    first, states = step(prefill, begun, [SLOTS] * 4, slots, empty, 256, sizes)
    rest = [
        each.part(len(part.inputs), len(each.inputs))
        for each, part in zip(asked, begun, strict=True)
    ]
    moved = [5, 0, 11, 3]
    second, states = step(prefill, rest, slots, [5, SLOTS, 11, 3], states, 256, sizes)
    for row, each in enumerate(asked):
        right, memory = expected(each, sizes)
        answers = np.concatenate([first[row], second[row]])
        np.testing.assert_allclose(answers, right, atol=BOUND)
        np.testing.assert_allclose(states.memory[moved[row]], memory, atol=BOUND)
    assert unchanged(states, before, set(range(SLOTS)) - {*slots, *moved})


@pytest.mark.parametrize("kernel", slow_but(list(KERNELS), ["tpu"]), indirect=True)
def test_rows_that_end_beside_borders_of_blocks(kernel: str) -> None:
    """Rows begin at any token; some have none, and the kernel takes one of a single token.

    Keys repeat and little is forgotten, so that rounded products would add up to more than BOUND.
    """
    lengths = np.array([0, 63, 1, 64, 65, 0, 5])
    before_first = 3
    rows = len(lengths)
    total = before_first + lengths.sum() + 2
    starts = before_first + np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(rows), lengths)
    live = np.pad(np.ones(lengths.sum(), bool), (before_first, 2))
    heads = random_heads(total, live)
    own = np.arange(rows)
    write = np.where(lengths > 0, own + 2, SLOTS)
    read = np.where(own == 3, SLOTS, np.where(own == 4, own + 6, own + 2))
    memory = np.random.default_rng(1).normal(size=(SLOTS, *SIZE[:4])).astype(np.float32)
    memory[np.setdiff1d(np.arange(SLOTS), read[lengths > 0])] = np.nan
    chunks = Chunks(
        starts=jnp.asarray(starts),
        sizes=jnp.asarray(lengths),
        chunk=jnp.asarray(np.pad(owner, (before_first, 2), mode="edge")),
        live=jnp.asarray(live),
        read=jnp.asarray(read),
        write=jnp.asarray(write),
    )
    run = jax.jit(partial(KERNELS[kernel].prefill, options=options()), donate_argnums=1)
    out, after = (np.asarray(x) for x in run(heads, jnp.asarray(memory), chunks))
    assert not out[~live].any()
    for row in np.flatnonzero(lengths):
        tokens = slice(starts[row], starts[row] + lengths[row])
        begin = memory[read[row]] if read[row] < SLOTS else np.zeros(SIZE[:4])
        right, state = followed(jax.tree.map(lambda x, some=tokens: x[some], heads), begin)
        np.testing.assert_allclose(out[tokens], right, atol=BOUND)
        np.testing.assert_allclose(after[write[row]], state, atol=BOUND)
    rest = np.setdiff1d(np.arange(SLOTS), write)
    np.testing.assert_array_equal(after[rest], memory[rest])


def random_heads(count: int, live: np.ndarray) -> Heads:
    """Draw what the rule takes of tokens; those that are not live have zeros."""
    rng = np.random.default_rng(0)
    k, r, d, v = SIZE

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).sum(-1, keepdims=True))

    heads = Heads(
        unit(rng.normal(size=(count, k, d))) / np.sqrt(d),
        unit(rng.normal(size=(KEYS, k, d)))[rng.integers(KEYS, size=count)],
        rng.normal(size=(count, k, r, v)),
        -rng.uniform(0, 0.01, size=(count, k, r)),
        rng.uniform(0.5, 1, size=(count, k, r)),
    )
    for x in heads:
        x[~live] = 0
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), heads)


def followed(heads: Heads, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the answers to one row's tokens, and the state behind them, in float64."""
    query, key, value, decay, writing = (np.asarray(x, np.float64) for x in heads)
    memory = memory.astype(np.float64)
    answers = []
    for t in range(len(query)):
        memory = memory * np.exp(decay[t])[..., None, None]
        wrong = value[t] - np.einsum("krdv,kd->krv", memory, key[t])
        memory = memory + np.einsum("kd,krv->krdv", key[t], wrong * writing[t][..., None])
        answers.append(np.einsum("krdv,kd->krv", memory, query[t]))
    return np.array(answers), memory


@pytest.mark.parametrize("kernel", slow_but(list(KERNELS), ["tpu"]), indirect=True)
def test_a_prompt_has_the_same_bits_whatever_runs_beside_it(
    prefill: Callable[..., Advanced],
) -> None:
    asked = [random_sequence(seed, length, SIZE) for seed, length in enumerate((5, 141, 33))]

    def run(rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        parts = [asked[row] for row in rows]
        empty = states_of(np.nan, SIZE, SLOTS)
        answers, states = step(prefill, parts, [SLOTS] * len(rows), rows, empty, 256, SIZE)
        return answers[rows.index(1)], np.asarray(states.memory[1])

    alone, together, last = run([1]), run([0, 1, 2]), run([2, 0, 1])
    assert all(np.array_equal(x, y) for x, y in zip(alone, together, strict=True))
    assert all(np.array_equal(x, y) for x, y in zip(alone, last, strict=True))


@pytest.mark.parametrize("kernel", slow_but(list(KERNELS), ["tpu"]), indirect=True)
def test_a_prompt_with_no_number_stays_in_its_row(prefill: Callable[..., Advanced]) -> None:
    asked = [random_sequence(seed, 9, MANY) for seed in range(3)]
    asked[1] = asked[1]._replace(inputs=np.full_like(asked[1].inputs, np.nan))
    answers, states = step(
        prefill, asked, [SLOTS] * 3, [3, 4, 5], states_of(np.nan, MANY, SLOTS), 64, MANY
    )
    for row in (0, 2):
        right, memory = expected(asked[row], MANY)
        np.testing.assert_allclose(answers[row], right, atol=BOUND)
        np.testing.assert_allclose(states.memory[3 + row], memory, atol=BOUND)
    assert np.isnan(answers[1]).all()
