"""Kernels of the gated delta rule keep the contract, in Pallas's interpreters.

Decode steps against numpy in float64, which follows one sequence at a time. On a GPU the Hopper
kernel runs.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

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
from tests.pallas_kernels.hopper_kernels import interpreted_or_run, on_gpu
from tests.slow_cases import slow_but

KERNELS = {"tpu": tpu, "gpu": gpu}
BOUND = 2e-5
LENGTH = 6  # tokens of a sequence, the last of which a kernel advances
SLOTS = 12
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
    if request.param == "gpu":
        with interpreted_or_run(monkeypatch):
            yield request.param
        return
    if on_gpu():
        pytest.skip("its interpreter is for a CPU")
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
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


def as_numpy(states: DeltaStates) -> list[np.ndarray]:
    return [np.array(x) for x in states]


def unchanged(states: DeltaStates, before: list[np.ndarray], slots: set[int]) -> bool:
    """Return whether these slots have the bits that they had."""
    rest = sorted(slots)
    return all(
        np.array_equal(np.asarray(x)[rest], old[rest], equal_nan=True)
        for x, old in zip(states, before, strict=True)
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
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
    slow_but([(), (0,), (3,), (1, 2), (0, 3), (0, 1, 2, 3)], [(), (1, 2), (0, 3)]),
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


# ---- prompts


@pytest.fixture
def prefill() -> Iterator[Callable[..., Advanced]]:
    """Interpret the TPU kernel of prompts, with rows of one token beside them."""
    if on_gpu():
        pytest.skip("its interpreter is for a CPU")

    def advance(*operands: Any) -> Advanced:
        return chunked.advance(*operands, None, tpu, Options())

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield jax.jit(advance, donate_argnums=2)


@pytest.mark.parametrize("sizes", [Sizes(2, 2, 128, 128), Sizes(1, 1, 128, 256)], ids=str)
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


def test_a_prompt_with_no_number_stays_in_its_row(prefill: Callable[..., Advanced]) -> None:
    asked = [random_sequence(seed, 9, SIZE) for seed in range(3)]
    asked[1] = asked[1]._replace(inputs=np.full_like(asked[1].inputs, np.nan))
    answers, states = step(
        prefill, asked, [SLOTS] * 3, [3, 4, 5], states_of(np.nan, SIZE, SLOTS), 64, SIZE
    )
    for row in (0, 2):
        right, memory = expected(asked[row], SIZE)
        np.testing.assert_allclose(answers[row], right, atol=BOUND)
        np.testing.assert_allclose(states.memory[3 + row], memory, atol=BOUND)
    assert np.isnan(answers[1]).all()


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
