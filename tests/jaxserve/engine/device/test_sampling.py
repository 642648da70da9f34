"""The sampler's parts against a sampler that sorts, counts and loops in numpy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from jaxserve.engine.device.logprobs import log_probabilities
from jaxserve.engine.device.row_packing import allowed_bits
from jaxserve.engine.device.sampling import apply_constraints, apply_penalties, sample
from jaxserve.engine.device.token_choice import choose_tokens, ordered, truncate
from tests.jaxserve.engine.device.sampling_rows import (
    EVERYTHING,
    PLAIN,
    SLOTS,
    RowParams,
    constrained_logits,
    penalised_logits,
    probabilities,
    row_fields,
    row_sampling,
)

VOCAB = 67  # two words of the mask and a bit
SAMPLE = jax.jit(sample)
ORDERED = jax.jit(ordered)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


# ---- min_p, top_k, top_p


def random_truncation(rng: np.random.Generator) -> RowParams:
    """Draw parameters in which each of the three is off, mild or severe."""
    return replace(
        PLAIN,
        temperature=float(rng.choice([0.3, 1.0, 2.0])),
        top_k=int(rng.choice([0, 1, 3, 20, VOCAB, 1000, 2**31 - 1])),
        top_p=float(rng.choice([1.0, 0.99, 0.8, 0.3, 1e-6])),
        min_p=float(rng.choice([0.0, 1e-4, 0.05, 0.5, 1.0])),
    )


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
def test_truncation_keeps_what_sorting_keeps(step: float) -> None:
    rng = np.random.default_rng(3)
    row_params = [random_truncation(rng) for _ in range(512)]
    logits = random_logits(512)
    logits = np.round(logits / step) * np.float32(step) if step else logits
    below_peak = (logits - logits.max(-1, keepdims=True)) / np.float32(
        [[a.temperature] for a in row_params]
    )
    found = np.isfinite(jax.jit(truncate)(below_peak, row_sampling(row_params)))
    skipped = 0
    for a, row, kept in zip(row_params, below_peak, found, strict=True):
        p, gap = probabilities(row * np.float64(a.temperature), a)
        if gap < 1e-6:
            skipped += 1
            continue
        np.testing.assert_array_equal(kept, p > 0, err_msg=str(a))
    assert skipped < 5


def test_ties_stay_in() -> None:
    tied = np.zeros((4, VOCAB), np.float32) - 3
    tied[:, [5, 9, 40]] = 0.0
    tied[:, 9] = -0.0
    draw = replace(PLAIN, temperature=1.0)
    row_params = [
        replace(draw, top_k=1),
        replace(draw, top_p=0.01),
        replace(draw, min_p=1.0),
        replace(draw, top_k=4),
    ]
    kept = np.isfinite(jax.jit(truncate)(tied, row_sampling(row_params)))
    assert kept.sum(-1).tolist() == [3, 3, 3, VOCAB]


@pytest.mark.parametrize("top_p", [1e-30, 1e-38, 1e-39, 1e-45, 5e-324])
def test_the_smallest_top_p_keeps_the_peak(top_p: float) -> None:
    logits = random_logits(4)
    below_peak = logits - logits.max(-1, keepdims=True)
    row_params = [replace(PLAIN, temperature=0.8, top_p=top_p) for _ in logits]
    kept = np.isfinite(jax.jit(truncate)(below_peak, row_sampling(row_params)))
    np.testing.assert_array_equal(kept, below_peak == 0)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=16, max_size=16))
@settings(max_examples=200)
def test_ordered_has_the_order_of_the_floats(values: list[float]) -> None:
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        1e-45,
        -1e-45,
        1.1754944e-38,
        -1.1754944e-38,
        3.4028235e38,
        -3.4028235e38,
    ]
    floats = np.array(values + special, np.float32)
    order = np.asarray(ORDERED(floats))
    np.testing.assert_array_equal(order[:, None] < order, floats[:, None] < floats)


# ---- greedy


def test_temperature_zero_takes_the_most_probable_and_the_first_of_equals() -> None:
    logits = random_logits(8)
    logits[1] = -7.5
    logits[2, [3, 60]] = 20.0
    row_params = [replace(PLAIN, top_k=5, top_p=0.5, min_p=0.9, seed=i) for i in range(8)]
    fields, rows = row_fields(row_params, VOCAB)
    tokens = SAMPLE(logits, row_sampling(row_params), fields, rows, np.zeros(8, np.int32)).tokens
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    assert tokens[1] == 0 and tokens[2] == 3


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1.2e-38, 1e-42])
def test_the_lowest_temperatures_are_greedy(temperature: float) -> None:
    """Divided by 1e-38, all logits would become infinite."""
    logits = np.stack([random_logits(1)[0] + shift for shift in (-50, 0, 50, 0)])
    row_params = [replace(PLAIN, temperature=temperature, top_p=p) for p in (1.0, 1.0, 1.0, 0.9)]
    tokens = jax.jit(choose_tokens)(logits, row_sampling(row_params), np.zeros(4, np.int32))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


# ---- the processors before it


def random_processors(rng: np.random.Generator) -> RowParams:
    """Draw parameters in which each processor is on or off.

    The history has repeats, and the allowed tokens hold some biased and some end tokens.
    """
    history = tuple(rng.integers(0, VOCAB, rng.integers(1, 40)).tolist())
    prompt_tokens = int(rng.integers(0, len(history) + 1))
    biased = rng.permutation(VOCAB)[: rng.integers(1, VOCAB)].tolist()
    row_params = replace(
        PLAIN,
        prompt=history[:prompt_tokens],
        output=history[prompt_tokens:],
        min_tokens=int(rng.integers(0, 4)),
        stop_token_ids=tuple(rng.permutation(VOCAB)[: rng.integers(0, 5)].tolist()),
    )
    if rng.random() < 0.7:
        row_params = replace(
            row_params,
            repetition_penalty=float(rng.choice([0.5, 1.0, 1.7])),
            presence_penalty=float(rng.choice([0.0, -2.0, 1.5])),
            frequency_penalty=float(rng.choice([0.0, -0.3, 2.0])),
        )
    if rng.random() < 0.5:
        values = rng.uniform(-100, 100, len(biased)).tolist()
        row_params = replace(row_params, logit_bias=dict(zip(biased, values, strict=True)))
    if rng.random() < 0.5:
        allowed = rng.permutation(VOCAB)[: rng.integers(1, VOCAB)].tolist()
        row_params = replace(row_params, allowed_token_ids=tuple(allowed))
    return row_params


def test_constraints_and_penalties_match_numpy() -> None:
    rng = np.random.default_rng(11)
    row_params = [random_processors(rng) for _ in range(64)]
    position = np.array([len(a.prompt) + rng.integers(0, 4) for a in row_params], np.int32)
    logits = random_logits(64)
    p = row_sampling(row_params)
    fields, rows = row_fields(row_params, VOCAB)
    constrained = jax.jit(apply_constraints)(
        logits, p, fields, rows, np.zeros(64, np.int32), position
    )
    after_penalties = jax.jit(apply_penalties)(
        constrained, p, fields, rows, np.zeros((64, 0), np.int32)
    )
    for i, a in enumerate(row_params):
        np.testing.assert_array_equal(
            constrained[i], constrained_logits(logits[i], a, int(position[i])), err_msg=str(a)
        )
        np.testing.assert_allclose(
            after_penalties[i],
            penalised_logits(np.asarray(constrained[i]), a),
            rtol=1e-6,
            atol=1e-5,
        )
    tokens = SAMPLE(logits, p, fields, rows, position).tokens
    np.testing.assert_array_equal(tokens, np.asarray(after_penalties).argmax(-1))


def test_each_sampling_slot_has_its_own_mask() -> None:
    fields, rows = row_fields([PLAIN], VOCAB)
    fields.mask[0, 1] = [allowed_bits((token,), VOCAB) for token in (5, 7, 66)]
    p = replace(row_sampling([PLAIN] * SLOTS), masked=np.ones(SLOTS, np.int32))
    drafted = np.array([[VOCAB, VOCAB], [5, VOCAB], [5, 7]], np.int32)
    found = jax.jit(sample)(
        random_logits(SLOTS), p, fields, np.repeat(rows, SLOTS, axis=1), np.arange(SLOTS), drafted
    )
    assert found.tokens.tolist() == [5, 7, 66]


def test_end_tokens_are_ruled_out_for_exactly_min_tokens_tokens() -> None:
    row_params = [replace(PLAIN, prompt=(0,) * 10, min_tokens=2, stop_token_ids=(7, 66))] * 4
    logits = np.zeros((4, VOCAB), np.float32)
    position = np.arange(10, 14, dtype=np.int32)
    slot = np.zeros(4, np.int32)
    result = jax.jit(apply_constraints)(
        logits, row_sampling(row_params), *row_fields(row_params, VOCAB), slot, position
    )
    assert [np.flatnonzero(np.isinf(row)).tolist() for row in result] == [[7, 66], [7, 66], [], []]


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": {9: 50.0}},
        {"allowed_token_ids": (9,)},
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"min_tokens": 1, "stop_token_ids": (3,)},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_a_greedy_row_that_asks_for_one_thing_gets_it(asked: dict) -> None:
    """Token 3 is the most probable one, was in the output, and has to give way to token 9."""
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, [3, 9]] = 1.5, 1.0
    plain = replace(PLAIN, output=(3,))
    row_params = [plain, replace(plain, **asked)]
    if "min_tokens" in asked:
        row_params[1] = replace(row_params[1], prompt=(3,), output=())
    position = np.full(2, 1, np.int32)
    found = SAMPLE(
        logits, row_sampling(row_params), *row_fields(row_params, VOCAB), position
    ).tokens
    assert found.tolist() == [3, 9]


# ---- log-probabilities


@pytest.mark.parametrize("vocab", [1, 7, 16, 17, 20, 21, 300])
def test_log_probabilities_are_those_of_the_logits(vocab: int) -> None:
    """Vocabularies are around 16, where one pass becomes two, and 20, where padding ends."""
    logits = np.round(random_logits(6, vocab) * 4) / 4  # with ties: the lower id goes first
    logits[4] += 10000  # far from 0, where floats are coarse
    logits[5, 0] = 80
    tokens = np.arange(6, dtype=np.int32) % vocab
    chosen, ids, top = jax.jit(log_probabilities)(logits, tokens)
    expected = log_softmax(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(chosen, expected[np.arange(6), tokens], rtol=2e-6, atol=2e-6)
    best = np.argsort(-expected, axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids[:, : best.shape[1]], best)
    np.testing.assert_allclose(
        top[:, : best.shape[1]], np.take_along_axis(expected, best, -1), rtol=2e-6, atol=2e-6
    )
    assert (ids[:, vocab:] == -1).all() and np.isneginf(top[:, vocab:]).all()


def test_log_probabilities_precede_the_processors() -> None:
    logits = random_logits(8)
    row_params = [replace(EVERYTHING, seed=i) for i in range(8)]
    fields, rows = row_fields(row_params, VOCAB)
    result = SAMPLE(logits, row_sampling(row_params), fields, rows, np.full(8, 8, np.int32))
    expected = log_softmax(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(
        result.logprob, expected[np.arange(8), result.tokens], rtol=2e-6, atol=2e-6
    )
    np.testing.assert_array_equal(result.top_ids, np.argsort(-logits, axis=-1)[:, :20])


# ---- what the compiler makes of it


def test_no_sort_of_the_vocabulary() -> None:
    row_params = [EVERYTHING] * 4
    fields, rows = row_fields(row_params, 1000)
    arguments = (
        random_logits(4, 1000),
        row_sampling(row_params),
        fields,
        rows,
        np.zeros(4, np.int32),
    )
    compiled = SAMPLE.lower(*arguments).compile().as_text()
    assert " sort(" not in compiled and 'custom_call_target="TopK"' in compiled
    assert " sort(" in jax.jit(jnp.sort).lower(arguments[0]).compile().as_text()
