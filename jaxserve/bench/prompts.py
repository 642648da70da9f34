"""Prompts of a load: random tokens, or texts."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxserve.bench.arrivals import Arrival

# Kinds of random streams.
PER_BLOCK = 0
PER_REQUEST = 1


class Prompts(Protocol):
    """A source of prompts."""

    def of(self, number: int, arrival: Arrival) -> list[int] | str:
        """Return the prompt of an arrival, given its number."""
        ...


class RandomPrompts:
    """Random tokens of a vocabulary, without those that are left out.

    A seed and the number of a run determine the prompts. Prompts of different runs have a prefix in
    common only by chance.
    """

    def __init__(self, vocab_size: int, left_out: Sequence[int], seed: int, run: int = 0):
        self._ids = np.setdiff1d(np.arange(vocab_size), left_out)
        self._seed = (seed, run)

    def of(self, number: int, arrival: Arrival) -> list[int]:
        if not arrival.blocks:
            return self._draw(PER_REQUEST, number, arrival.prompt_tokens).tolist()
        parts = [self._draw(PER_BLOCK, block, arrival.block_tokens) for block in arrival.blocks]
        return np.concatenate(parts)[: arrival.prompt_tokens].tolist()

    def _draw(self, kind: int, number: int, count: int) -> np.ndarray:
        return np.random.default_rng([*self._seed, kind, number]).choice(self._ids, count)


class TextPrompts:
    """Texts in their order, over and over."""

    def __init__(self, texts: Sequence[str]):
        self._texts = texts

    def of(self, number: int, arrival: Arrival) -> str:
        return self._texts[number % len(self._texts)]
