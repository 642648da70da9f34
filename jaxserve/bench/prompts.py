"""What the requests of a load say: random tokens, or texts."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxserve.bench.arrivals import Arrival

PER_BLOCK, PER_REQUEST = 0, 1  # kinds of random streams


class Prompts(Protocol):
    def of(self, number: int, arrival: Arrival) -> list[int] | str:
        """Of the arrival with this number."""
        ...


class RandomPrompts:
    """Random tokens of a vocabulary without those left out; the same seed and run give the same
    ones.

    run: its number. Prompts of different runs have no prefix in common, but for that of chance.
    """

    def __init__(self, vocab_size: int, left_out: Sequence[int], seed: int, run: int = 0):
        self._ids, self._seed = np.setdiff1d(np.arange(vocab_size), left_out), (seed, run)

    def of(self, number: int, arrival: Arrival) -> list[int]:
        if not arrival.blocks:
            return self._draw(PER_REQUEST, number, arrival.prompt_tokens).tolist()
        parts = [self._draw(PER_BLOCK, block, arrival.block_tokens) for block in arrival.blocks]
        return np.concatenate(parts)[: arrival.prompt_tokens].tolist()

    def _draw(self, kind: int, number: int, count: int) -> np.ndarray:
        return np.random.default_rng([*self._seed, kind, number]).choice(self._ids, count)


class TextPrompts:
    """Texts in their order, again from the first one after the last."""

    def __init__(self, texts: Sequence[str]):
        self._texts = texts

    def of(self, number: int, arrival: Arrival) -> str:
        return self._texts[number % len(self._texts)]
