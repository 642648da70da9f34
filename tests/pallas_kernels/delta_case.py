"""Sequences, steps and expected results of the gated delta rule, in float64 numpy."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.gated_delta.api import EPS, Advanced, DeltaStates, Tokens
from jaxserve.pallas_kernels.short_convolution.api import Chunks

TAPS = 4
SLOTS = 6
# Function that advances states over a step: gated_delta.reference.advance with a bound of tokens.
Advance = Callable[[Tokens, jax.Array, DeltaStates, Chunks], Advanced]


class Sizes(NamedTuple):
    """Sizes of a layer's states, by the letters of gated_delta.api."""

    k: int = 2
    r: int = 3
    d: int = 8
    v: int = 4

    @property
    def f(self) -> int:
        return 2 * self.d + self.r * self.v

    def __str__(self) -> str:
        return f"{self.k}x{self.r}x{self.d}x{self.v}"


SMALL = Sizes()


class Sequence(NamedTuple):
    """What the rule takes of the tokens of one sequence, from its first on."""

    inputs: np.ndarray  # [n, k, f]
    decay: np.ndarray  # [n, k, r]
    writing: np.ndarray  # [n, k, r]

    def part(self, begin: int, end: int) -> "Sequence":
        return Sequence(*(x[begin:end] for x in self))


def random_sequence(seed: int, length: int, sizes: Sizes = SMALL) -> Sequence:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(length, sizes.k, sizes.f))
    decay = -rng.uniform(0.01, 1, size=(length, sizes.k, sizes.r))
    return Sequence(inputs, decay, rng.uniform(size=(length, sizes.k, sizes.r)))


def random_taps(sizes: Sizes = SMALL) -> np.ndarray:
    return np.random.default_rng(99).normal(size=(TAPS, sizes.k, sizes.f))


def expected(sequence: Sequence, sizes: Sizes = SMALL) -> tuple[np.ndarray, np.ndarray]:
    """Return the answers [n, k, r, v] and the memory behind the last token [k, r, d, v]."""
    k, r, d, v = sizes
    taps = random_taps(sizes)
    padded = np.concatenate([np.zeros((TAPS - 1, k, sizes.f)), sequence.inputs])
    memory = np.zeros((k, r, d, v))
    answers = []
    for t in range(len(sequence.inputs)):
        mixed = np.einsum("tkf,tkf->kf", padded[t : t + TAPS], taps)
        mixed = mixed / (1 + np.exp(-mixed))
        query, key = (
            x / np.sqrt((x * x).sum(-1, keepdims=True) + EPS)
            for x in (mixed[:, :d], mixed[:, d : 2 * d])
        )
        value = mixed[:, 2 * d :].reshape(k, r, v)
        memory = memory * np.exp(sequence.decay[t])[..., None, None]
        wrong = value - np.einsum("krdv,kd->krv", memory, key)
        memory = memory + np.einsum("kd,krv->krdv", key, wrong * sequence.writing[t][..., None])
        answers.append(np.einsum("krdv,kd->krv", memory, query) / np.sqrt(d))
    return np.array(answers), memory


def states_of(value: float = np.nan, sizes: Sizes = SMALL, slots: int = SLOTS) -> DeltaStates:
    k, r, d, v = sizes
    return DeltaStates(
        jnp.full((slots, TAPS - 1, k, sizes.f), value, jnp.float32),
        jnp.full((slots, k, r, d, v), value, jnp.float32),
    )


def step(
    advance: Advance,
    parts: list[Sequence],
    read: list[int],
    write: list[int],
    states: DeltaStates,
    width: int,
    sizes: Sizes = SMALL,
) -> tuple[list[np.ndarray], DeltaStates]:
    """Advance rows over these tokens in a step of `width` tokens, whose padding holds NaN."""
    counts = [len(part.inputs) for part in parts]
    total = sum(counts)
    arrays = [np.concatenate(x) for x in zip(*parts, strict=True)]
    padded = [np.concatenate([x, np.full((width - total, *x.shape[1:]), np.nan)]) for x in arrays]
    starts = np.concatenate([[0], np.cumsum(counts)])
    chunk = np.minimum(np.searchsorted(starts, np.arange(width), side="right") - 1, len(parts) - 1)
    chunks = Chunks(
        *(jnp.asarray(starts[:-1]), jnp.asarray(counts)),
        *(jnp.asarray(chunk), jnp.arange(width) < total),
        *(jnp.asarray(read), jnp.asarray(write)),
    )
    tokens = Tokens(*(jnp.asarray(x, jnp.float32) for x in padded))
    done = advance(tokens, jnp.asarray(random_taps(sizes), jnp.float32), states, chunks)
    assert not np.asarray(done.out)[total:].any(), "padding has no answer"
    return np.split(np.asarray(done.out)[:total], starts[1:-1]), done.states
