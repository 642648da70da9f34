"""Kernels of the gated delta rule keep the contract in decode steps, in Pallas's interpreters.

Against numpy in float64, which follows one sequence at a time. On a GPU the Hopper
kernel runs.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.gated_delta import chunked, gpu, tpu
from jaxserve.pallas_kernels.gated_delta.api import Advanced, DeltaStates, Demand, Options
from tests.pallas_kernels.delta_case import (
    Sequence,
    Sizes,
    expected,
    random_sequence,
    states_of,
    step,
)
from tests.pallas_kernels.delta_kernels import (
    BOUND,
    KERNELS,
    SLOTS,
    as_numpy,
    interpreted,
    unchanged,
)
from tests.slow_cases import slow_but

LENGTH = 6  # tokens of a sequence, the last of which a kernel advances
SIZES = [
    Sizes(2, 3, 128, 128),
    Sizes(16, 1, 128, 128),  # two blocks of heads on a TPU
    Sizes(1, 2, 128, 256),
    Sizes(3, 1, 128, 128),
]
SIZE = SIZES[0]

pytestmark = pytest.mark.kernels


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Interpret a kernel in this block, and look for races."""
    with interpreted(request.param, monkeypatch):
        yield request.param


def decode(kernel: str) -> Callable[..., Advanced]:
    options = Options(jax.devices()[0].device_kind)
    return jax.jit(partial(KERNELS[kernel].decode, options=options), donate_argnums=2)


@cache
def sequences(sizes: Sizes, count: int = 4) -> list[Sequence]:
    return [random_sequence(seed, LENGTH, sizes) for seed in range(count)]


def behind_prompts(sizes: Sizes, slots: list[int]) -> DeltaStates:
    """Return states behind all tokens but the last of sequences; other slots hold NaN."""

    def advance(*operands: Any) -> Advanced:
        return chunked.advance(*operands, None, chunked, Options())

    prompts = [each.part(0, LENGTH - 1) for each in sequences(sizes)[: len(slots)]]
    empty = states_of(np.nan, sizes, SLOTS)
    width = LENGTH * len(slots)
    return step(advance, prompts, [SLOTS] * len(slots), slots, empty, width, sizes)[1]


def last_tokens(sizes: Sizes, count: int) -> list[Sequence]:
    return [each.part(LENGTH - 1, LENGTH) for each in sequences(sizes)[:count]]


@pytest.mark.parametrize("sizes", slow_but(SIZES, SIZES[2:]), ids=str)
def test_rows_go_on_from_their_states(kernel: str, sizes: Sizes) -> None:
    """Some rows write the slot that they read, and others leave it to others."""
    read = [5, 1, 8]
    write = [5, 3, 0]
    states = behind_prompts(sizes, read)
    before = as_numpy(states)
    answers, states = step(decode(kernel), last_tokens(sizes, 3), read, write, states, 3, sizes)
    for sequence, answer, slot in zip(sequences(sizes), answers, write, strict=False):
        right, memory = expected(sequence, sizes)
        np.testing.assert_allclose(answer, right[-1:], atol=BOUND)
        np.testing.assert_allclose(states.memory[slot], memory, atol=BOUND)
        kept = np.asarray(states.inputs[slot])
        np.testing.assert_array_equal(kept, np.float32(sequence.inputs[-3:]))
    assert unchanged(states, before, set(range(SLOTS)) - set(write))


def test_a_new_row_begins_with_an_empty_state(kernel: str) -> None:
    """Its slot may hold anything, such as NaN."""
    firsts = [each.part(0, 1) for each in sequences(SIZE)]
    states = states_of(np.nan, SIZE, SLOTS)
    before = as_numpy(states)
    slots = [7, 0, 11, 2]
    answers, states = step(decode(kernel), firsts, [SLOTS] * 4, slots, states, 4, SIZE)
    for first, answer, slot in zip(firsts, answers, slots, strict=True):
        right, memory = expected(first, SIZE)
        np.testing.assert_allclose(answer, right, atol=BOUND)
        np.testing.assert_allclose(states.memory[slot], memory, atol=BOUND)
        assert not np.asarray(states.inputs[slot])[:-1].any()
    assert unchanged(states, before, set(range(SLOTS)) - set(slots))


@pytest.mark.parametrize(
    "running",
    slow_but([(), (0,), (3,), (1, 2), (0, 3), (0, 1, 2, 3)], [(1, 2), (0, 3)]),
    ids=lambda rows: "rows" + "".join(map(str, rows)),
)
def test_rows_that_do_not_run(kernel: str, running: tuple[int, ...]) -> None:
    """They have no answer and change nothing, wherever they are among the others."""
    read = [5, 1, 8, 4]
    states = behind_prompts(SIZE, read)
    before = as_numpy(states)
    write = [slot if row in running else SLOTS for row, slot in enumerate(read)]

    def only_running(*operands: Any) -> Advanced:
        *others, chunks = operands
        return decode(kernel)(*others, chunks._replace(live=chunks.write < SLOTS))

    answers, states = step(only_running, last_tokens(SIZE, 4), read, write, states, 4, SIZE)
    for row, answer in enumerate(answers):
        if row in running:
            right, memory = expected(sequences(SIZE)[row], SIZE)
            np.testing.assert_allclose(answer, right[-1:], atol=BOUND)
            np.testing.assert_allclose(states.memory[read[row]], memory, atol=BOUND)
        else:
            assert not answer.any()
    assert unchanged(states, before, set(range(SLOTS)) - set(write))


def test_a_row_has_the_same_bits_whatever_runs_beside_it(kernel: str) -> None:
    read = [5, 1, 8, 4]
    together, states = step(
        decode(kernel), last_tokens(SIZE, 4), read, read, behind_prompts(SIZE, read), 4, SIZE
    )
    prompts = behind_prompts(SIZE, read)
    single = [last_tokens(SIZE, 4)[2]]
    alone, after = step(decode(kernel), single, [8], [8], prompts, 1, SIZE)
    assert np.array_equal(alone[0], together[2])
    assert all(np.array_equal(x[8], y[8]) for x, y in zip(after, states, strict=True))


def test_a_number_that_is_none_stays_in_its_row(kernel: str) -> None:
    read = [5, 1, 8]
    states = behind_prompts(SIZE, read)
    broken = last_tokens(SIZE, 3)
    broken[1] = broken[1]._replace(inputs=np.full_like(broken[1].inputs, np.nan))
    answers, states = step(decode(kernel), broken, read, read, states, 3, SIZE)
    assert np.isnan(answers[1]).all() and np.isnan(states.memory[1]).all()
    for row in (0, 2):
        right, memory = expected(sequences(SIZE)[row], SIZE)
        np.testing.assert_allclose(answers[row], right[-1:], atol=BOUND)
        np.testing.assert_allclose(states.memory[read[row]], memory, atol=BOUND)


def test_inputs_of_16_bits(kernel: str) -> None:
    """Convolved numbers are rounded to the dtype of the inputs, as in the reference."""
    read = [5, 1]

    def by(advance: Callable[..., Advanced]) -> Callable[..., Advanced]:
        def narrowed(tokens: Any, taps: jax.Array, *others: Any) -> Advanced:
            narrow = tokens._replace(inputs=tokens.inputs.astype(jnp.bfloat16))
            return advance(narrow, taps.astype(jnp.bfloat16), *others)

        return narrowed

    def right(*operands: Any) -> Advanced:
        return chunked.decode(*operands, Options())

    found, wanted = (
        step(by(advance), last_tokens(SIZE, 2), read, read, behind_prompts(SIZE, read), 2, SIZE)
        for advance in (decode(kernel), jax.jit(right))
    )
    for ours, theirs in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=BOUND)


def test_what_the_kernels_refuse() -> None:
    demand = Demand(16, 3, 128, 128, 4)
    for kernel in KERNELS.values():
        kernel.check(Options("TPU v5 lite" if kernel is tpu else "NVIDIA H200"), demand)
        with pytest.raises(KernelError, match=r"states of 64 x 128 .*--recurrence reference"):
            kernel.check(Options(), demand._replace(d=64))
        with pytest.raises(KernelError, match=r"states of 128 x 192 .*--recurrence reference"):
            kernel.check(Options(), demand._replace(v=192))
    with pytest.raises(KernelError, match=r"for Hopper .*; this is NVIDIA A100"):
        gpu.check(Options("NVIDIA A100-SXM4-80GB"), demand)
    with pytest.raises(KernelError, match=r"states of 17 key heads with 4 value heads each take"):
        tpu.check(Options("TPU v4"), demand._replace(k=17, r=4))
    with pytest.raises(KernelError, match=r"160 value heads of 128 numbers take 263168 of 233472"):
        gpu.check(Options("NVIDIA H200"), demand._replace(r=160))
