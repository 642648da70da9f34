"""A draw depends on its distribution, seed, choice and position, and on no neighbour."""

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scipy.stats import chisquare, gumbel_r, kstest

from jaxserve.engine.device.sampling import Sampled, sample
from jaxserve.engine.device.token_choice import gumbel
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.device.sampling_rows import (
    EVERYTHING,
    PLAIN,
    RowParams,
    probabilities,
    row_fields,
    row_sampling,
)

VOCAB = 67
DRAWS = 16384
SAMPLE = jax.jit(sample)


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)


def run_sampler(
    logits: np.ndarray, row_params: list[RowParams], position: np.ndarray, lanes: int = 1
) -> Sampled:
    fields, rows = row_fields(row_params, VOCAB, lanes)
    result = SAMPLE(logits, row_sampling(row_params), fields, rows, position.astype(np.int32))
    return jax.tree.map(np.asarray, result)


# ---- distributions


def draw_tokens(logits: np.ndarray, a: RowParams, vary: str) -> np.ndarray:
    """Draw DRAWS tokens of one distribution, by DRAWS seeds, (choice, seed) pairs or positions."""
    one = row_sampling([a])
    p = jax.tree.map(lambda field: np.repeat(field, DRAWS, axis=0), one)
    number = np.arange(DRAWS, dtype=np.int32)
    position = number if vary == "position" else np.full_like(number, 5)
    if vary == "seed":
        p = replace(p, key=np.stack([number * 0, number], axis=-1).astype(np.uint32))
    if vary == "choice":
        p = replace(
            p,
            key=np.stack([number // 16, number * 0], axis=-1).astype(np.uint32),
            choice=number % 16,
        )
    fields, rows = row_fields([a], VOCAB)
    everywhere = np.repeat(rows, DRAWS, axis=1)
    return np.asarray(
        SAMPLE(np.repeat(logits[None], DRAWS, axis=0), p, fields, everywhere, position).tokens
    )


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Return the p-value of Pearson's chi-squared test.

    Cells that expect fewer than five draws are merged.
    """
    observed = np.bincount(tokens, minlength=VOCAB)
    expected = expected * DRAWS
    assert not observed[expected == 0].any(), "drew a token of probability 0"
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    present = expected > 0
    return float(chisquare(observed[present], expected[present]).pvalue)


DISTRIBUTIONS = {
    "plain": {},
    "cool": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.4, "top_k": 12, "top_p": 0.85, "min_p": 0.02},
}


@pytest.mark.parametrize("vary", ["position", "seed", "choice"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_closed_form(name: str, vary: str) -> None:
    a = replace(PLAIN, temperature=1.0, seed=17)
    a = replace(a, **DISTRIBUTIONS[name])
    logits = random_logits(1)[0]
    expected, gap = probabilities(logits, a)
    assert gap > 1e-4
    assert p_value(draw_tokens(logits, a, vary), expected) > 1e-3


def test_a_wrong_distribution_is_noticed() -> None:
    """The test above has the power to tell a temperature of 1 from 1.1."""
    logits = random_logits(1)[0]
    tokens = draw_tokens(logits, replace(PLAIN, temperature=1.1), "position")
    assert p_value(tokens, probabilities(logits, replace(PLAIN, temperature=1.0))[0]) < 1e-6


# ---- noise

NOISE_VOCAB = 4096
NOISE = jax.jit(gumbel, static_argnums=3)


def noise(*triples: tuple[int, int, int]) -> np.ndarray:
    """Return noise [n, NOISE_VOCAB] for n triples of seed, choice and position."""
    seeds, choices, positions = zip(*triples, strict=True)
    key = np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)
    return np.asarray(NOISE(key, np.int32(choices), np.int32(positions), NOISE_VOCAB))


def test_noise_is_the_documented_fold() -> None:
    """Noise is jax.random's fold_in of choice, position and 0 into a seed of 64 bits."""
    for seed, choice, position in ((0, 0, 0), (2**64 - 1, 15, 2**31 - 1), (2**40 + 1, 3, 1000)):
        key = jax.random.wrap_key_data(
            np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), impl="threefry2x32"
        )
        for data in (choice, position, 0):
            key = jax.random.fold_in(key, data)
        expected = jax.random.gumbel(key, (NOISE_VOCAB,), np.float32, mode="high")
        np.testing.assert_array_equal(noise((seed, choice, position))[0], expected)


def test_noise_of_other_triples_is_independent() -> None:
    """Noise of neighbouring triples, and of triples of equal sum, is uncorrelated."""
    found = noise(
        (1, 0, 0),
        (2, 0, 0),
        (2**32, 0, 0),
        (2**32 + 1, 0, 0),
        (1, 1, 0),
        (1, 0, 1),
        (0, 1, 1),
        (0, 0, 2),
    )
    off_diagonal = np.corrcoef(found) - np.eye(len(found))
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(NOISE_VOCAB)
    for row in found:
        assert kstest(row, gumbel_r.cdf).pvalue > 1e-3


def test_a_draw_is_the_same_in_any_row_batch_and_lane() -> None:
    logits = random_logits(8)
    position = np.arange(100, 108)
    row_params = [replace(PLAIN, temperature=1.5, seed=3, choice=i % 2) for i in range(8)]
    tokens = run_sampler(logits, row_params, position).tokens
    turned = [3, 4, 5, 6, 7, 0, 1, 2]
    elsewhere = run_sampler(
        logits[turned], [row_params[i] for i in turned], position[turned]
    ).tokens
    np.testing.assert_array_equal(elsewhere, tokens[turned])
    np.testing.assert_array_equal(
        run_sampler(logits[2:5], row_params[2:5], position[2:5]).tokens, tokens[2:5]
    )
    np.testing.assert_array_equal(run_sampler(logits, row_params, position, lanes=2).tokens, tokens)
    assert len(set(tokens.tolist())) > 3


def test_sharded_lanes_sample_as_one_device_does() -> None:
    logits = random_logits(8)
    position = np.arange(8, dtype=np.int32)
    row_params = [replace(EVERYTHING, min_tokens=0, seed=i) for i in range(8)]
    fields, rows = row_fields(row_params, VOCAB, lanes=4)
    lanes = NamedSharding(MeshSpec(data=4, tensor=2).build(jax.devices()), PartitionSpec("data"))
    placed = jax.device_put((logits, row_sampling(row_params), fields, rows, position), lanes)
    whole = run_sampler(logits, row_params, position)
    for name, value in SAMPLE(*placed)._asdict().items():
        np.testing.assert_allclose(value, getattr(whole, name), rtol=1e-6, err_msg=name)


# ---- neighbours

TARGETS: dict[str, RowParams] = {
    "greedy": PLAIN,
    "plain draw": replace(PLAIN, temperature=1.0, seed=9),
    "truncated": replace(PLAIN, temperature=1.0, seed=9, top_k=20, top_p=0.95, min_p=0.001),
    "penalised": replace(EVERYTHING, logprobs=None, allowed_token_ids=None, logit_bias={}),
    "reported": replace(PLAIN, logprobs=20),
    "everything": EVERYTHING,
}
NEIGHBOURS: dict[str, Callable[[int], RowParams]] = {
    "idle": lambda i: PLAIN,
    "drawing": lambda i: replace(PLAIN, temperature=1.0, seed=i),
    "busy": lambda i: replace(EVERYTHING, seed=i),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_row_does_not_feel_its_neighbours(name: str) -> None:
    """Results are equal bit for bit beside idle, busy and NaN neighbours, in any slot."""
    target = TARGETS[name]
    mine = -np.abs(random_logits(1, seed=5)[0])
    mine[:9] = -0.0  # adding 0 would change it
    mine[5] = 0.0
    seen = []
    for make in NEIGHBOURS.values():
        for slot in (0, 5):
            for poison in (0.0, np.nan):
                logits = random_logits(8) + np.float32(poison)
                logits[slot] = mine
                row_params = [make(i) for i in range(8)]
                row_params[slot] = target
                result = run_sampler(logits, row_params, np.full(8, 8))
                assert result.finite.tolist() == [
                    i == slot or not np.isnan(poison) for i in range(8)
                ]
                parts = list(result) if target.logprobs is not None else [result.tokens]
                seen.append(b"".join(part[slot].tobytes() for part in parts))
    assert len(set(seen)) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_logit_anywhere_raises_the_rows_flag_alone(bad: float) -> None:
    """A bad logit is found even beside the largest and smallest of floats."""
    row_params = [PLAIN] * 8
    for token in (0, 1, 33, VOCAB - 1):
        logits = random_logits(8)
        logits[:, 20] = 3.4e38
        logits[:, 50] = -3.4e38
        logits[2, token] = bad
        assert run_sampler(logits, row_params, np.zeros(8)).finite.tolist() == [
            i != 2 for i in range(8)
        ]
