"""Forms of the gated delta rule against numpy, which follows one sequence at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.gated_delta import chunked, reference
from jaxserve.pallas_kernels.gated_delta.api import DeltaStates, Options, Tokens
from jaxserve.pallas_kernels.short_convolution.api import Chunks
from tests.pallas_kernels import delta_case
from tests.pallas_kernels.delta_case import (
    SLOTS,
    SMALL,
    Sequence,
    expected,
    random_sequence,
    random_taps,
    states_of,
)

BOUND = 2e-5
FORMS = {
    "token by token": reference.advance,
    "blocks": partial(chunked.advance, kernel=chunked, options=Options()),
}


@jax.jit(static_argnames=("form", "most"))
def run(form: str, tokens: Tokens, taps: jax.Array, states: DeltaStates, chunks: Chunks, most=None):
    return FORMS[form](tokens, taps, states, chunks, most)


def step(
    form: str,
    parts: list[Sequence],
    read: list[int],
    write: list[int],
    states: DeltaStates,
    width: int,
    most: int | None = None,
) -> tuple[list[np.ndarray], DeltaStates]:
    """Advance rows as delta_case.step does, by a form."""

    def advance(*operands):
        return run(form, *operands, most=most)

    return delta_case.step(advance, parts, read, write, states, width)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_all_lengths_in_one_step(form: str) -> None:
    """Rows of 1, 2, 64 and 140 tokens begin with empty states, in slots that hold NaN."""
    sequences = [random_sequence(seed, length) for seed, length in enumerate((1, 2, 64, 140))]
    slots = [4, 0, 5, 2]
    answers, states = step(form, sequences, [SLOTS] * 4, slots, states_of(), width=256)
    for sequence, answer, slot in zip(sequences, answers, slots, strict=True):
        right, memory = expected(sequence)
        np.testing.assert_allclose(answer, right, atol=BOUND)
        np.testing.assert_allclose(states.memory[slot], memory, atol=BOUND)
    for slot in (1, 3):
        assert np.isnan(states.memory[slot]).all() and np.isnan(states.inputs[slot]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("borders", [(1, 2, 3, 11), (8,), (3, 40), (65, 69)])
def test_chunks_make_no_difference(form: str, borders: tuple[int, ...]) -> None:
    """Chunks of any size give the same numbers; each writes another slot than it reads."""
    sequence = random_sequence(3, 70)
    (whole,), after = step(form, [sequence], [SLOTS], [0], states_of(), width=96)
    states = states_of()
    ends = (*borders, 70)
    parts = []
    for i, (begin, end) in enumerate(zip((0, *borders), ends, strict=True)):
        read = SLOTS if i == 0 else (i - 1) % 2
        (part,), states = step(form, [sequence.part(begin, end)], [read], [i % 2], states, width=96)
        parts.append(part)
    last = (len(ends) - 1) % 2
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=BOUND)
    np.testing.assert_allclose(states.memory[last], after.memory[0], atol=BOUND)
    assert np.array_equal(states.inputs[last], after.inputs[0])


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_all_lengths_in_their_own_slots(form: str) -> None:
    """Rows of 1, 2 and 70 tokens read the slots that they write."""
    sequences = [random_sequence(seed, length) for seed, length in enumerate((9, 10, 78))]
    slots = [5, 1, 3]
    prompts = [s.part(0, 8) for s in sequences]
    _, states = step(form, prompts, [SLOTS] * 3, slots, states_of(), width=32)
    rest = [s.part(8, len(s.inputs)) for s in sequences]
    answers, states = step(form, rest, slots, slots, states, width=80)
    for sequence, answer, slot in zip(sequences, answers, slots, strict=True):
        right, memory = expected(sequence)
        np.testing.assert_allclose(answer, right[8:], atol=BOUND)
        np.testing.assert_allclose(states.memory[slot], memory, atol=BOUND)


@pytest.mark.parametrize("form", FORMS)
def test_a_token_that_repeats(form: str) -> None:
    """Its key is known already, and hardly anything is forgotten."""
    one = random_sequence(3, 1)
    repeated = Sequence(
        np.repeat(one.inputs, 130, axis=0),
        np.full((130, *one.decay.shape[1:]), -1e-4),
        np.full((130, *one.writing.shape[1:]), 0.999),
    )
    (answers,), states = step(form, [repeated], [SLOTS], [0], states_of(), width=160)
    right, memory = expected(repeated)
    np.testing.assert_allclose(answers, right, atol=BOUND)
    np.testing.assert_allclose(states.memory[0], memory, atol=BOUND)


@pytest.mark.parametrize("form", FORMS)
def test_steps_of_one_token_per_row(form: str) -> None:
    """The step of decodes agrees with the one of prompts."""
    sequences = [random_sequence(seed, 9) for seed in range(3)]
    slots = [5, 1, 3]
    _, states = step(
        form, [s.part(0, 8) for s in sequences], [SLOTS] * 3, slots, states_of(), width=32
    )
    newest = [s.part(8, 9) for s in sequences]
    answers, states = step(form, newest, slots, slots, states, width=3, most=1)
    for sequence, answer, slot in zip(sequences, answers, slots, strict=True):
        right, memory = expected(sequence)
        np.testing.assert_allclose(answer, right[8:], atol=BOUND)
        np.testing.assert_allclose(states.memory[slot], memory, atol=BOUND)


@pytest.mark.parametrize("form", FORMS)
def test_steps_of_a_few_tokens_per_row(form: str) -> None:
    """Rows that verify have up to four; the forms know that."""
    sequences = [random_sequence(seed, length) for seed, length in enumerate((12, 9, 8, 10))]
    slots = [5, 1, 3, 0]
    _, states = step(
        form, [s.part(0, 8) for s in sequences], [SLOTS] * 4, slots, states_of(), width=32
    )
    rest = [s.part(8, 12) for s in sequences]
    answers, states = step(form, rest, slots, slots, states, width=16, most=4)
    for sequence, answer, slot in zip(sequences, answers, slots, strict=True):
        right, memory = expected(sequence)
        np.testing.assert_allclose(answer, right[8:], atol=BOUND)
        np.testing.assert_allclose(states.memory[slot], memory, atol=BOUND)


@pytest.mark.parametrize("form", FORMS)
def test_a_read_slot_stays_as_it_is(form: str) -> None:
    """Two rows go on from one state, and leave it to others."""
    sequence = random_sequence(3, 20)
    _, states = step(form, [sequence.part(0, 16)], [SLOTS], [2], states_of(0.0), width=16)
    before = jax.tree.map(lambda x: np.array(x[2]), states)
    rest = sequence.part(16, 20)
    answers, states = step(form, [rest, rest], [2, 2], [0, 1], states, width=8)
    right, _ = expected(sequence)
    for answer in answers:
        np.testing.assert_allclose(answer, right[16:], atol=BOUND)
    assert all(np.array_equal(x[2], old) for x, old in zip(states, before, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("most", [None, 1, 3])
def test_rows_that_do_not_run_change_nothing(form: str, most: int | None) -> None:
    """The token of a row that had ended is not live: no slot changes, bit for bit."""
    states = states_of(3.0)
    k, r, *_ = SMALL
    tokens = Tokens(*(jnp.full(shape, 0.5) for shape in ((2, k, SMALL.f), (2, k, r), (2, k, r))))
    chunks = Chunks(
        *(jnp.array([0, 1]), jnp.array([1, 1]), jnp.array([0, 1]), jnp.array([False, False])),
        *(jnp.array([1, 4]), jnp.array([SLOTS, SLOTS])),
    )
    done = run(form, tokens, jnp.asarray(random_taps(), jnp.float32), states, chunks, most)
    assert not done.out.any()
    assert all(np.array_equal(x, old) for x, old in zip(done.states, states, strict=True))
