"""When requests arrive, and how long they are; and the random tokens of their prompts.

Nothing here waits for an answer: arrivals are drawn, or read from a trace (benchmarks.traces), before anything is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.errors import ConfigError

PER_BLOCK, PER_REQUEST = 0, 1  # kinds of random streams


@dataclass(frozen=True, slots=True)
class Arrival:
    """due: seconds after the start. The other sizes are tokens.

    blocks: numbers of the prompt's blocks of `block_tokens`, of which the last may be cut short. Equal numbers stand
    for equal tokens. Without any, the prompt is like no other.
    """

    due: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, any number from low to high with equal probability."""

    low: int
    high: int

    @staticmethod
    def parse(text: str) -> "Lengths":
        """From "128" or "64-256"; ConfigError for anything else."""
        low, dash, high = text.partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
            raise ConfigError(f"{text!r} is not a length in tokens like 128 or 64-256")
        return Lengths(int(low), int(high))

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return rng.integers(self.low, self.high, count, endpoint=True).tolist()


def poisson(rate: float, requests: int, prompt: Lengths, output: Lengths, seed: int) -> list[Arrival]:
    """rate: requests/s on average. The same seed gives the same lengths and, but for the scale, the same gaps."""
    check_rate(rate)
    rng = np.random.default_rng(seed)
    lengths = prompt.draw(rng, requests), output.draw(rng, requests)
    gaps = rng.exponential(1 / rate, requests)
    gaps[:1] = 0.0
    return [Arrival(*row) for row in zip(np.cumsum(gaps).tolist(), *lengths, strict=True)]


def check_rate(rate: float) -> None:
    if not 0 < rate < np.inf:
        raise ConfigError(f"a rate of {rate:g} requests/s: it must be above 0")


def mean_gap(arrivals: Sequence[Arrival]) -> float:
    """Seconds; 0 when all come at once, or there is but one."""
    return (arrivals[-1].due - arrivals[0].due) / max(1, len(arrivals) - 1)


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same bursts, so much faster or slower that on average `rate` requests arrive in a second."""
    check_rate(rate)
    if not (gap := mean_gap(arrivals)):
        raise ConfigError(f"{len(arrivals)} requests that all arrive at once have no rate (raise --requests)")
    return stretched(arrivals, 1 / (rate * gap))


def stretched(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Gaps times the factor."""
    return [replace(a, due=a.due * factor) for a in arrivals]


def resized(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Lengths times the factor, at least one token each. What prompts shared, they share still."""
    return [_resized(a, factor) for a in arrivals]


def _resized(a: Arrival, factor: float) -> Arrival:
    """Block by block: a block is a whole number of tokens, the same one everywhere."""
    output = _scale(a.output_tokens, factor)
    if not a.blocks:
        return replace(a, prompt_tokens=_scale(a.prompt_tokens, factor), output_tokens=output)
    block, whole = _scale(a.block_tokens, factor), len(a.blocks) - 1
    rest = min(block, _scale(a.prompt_tokens - whole * a.block_tokens, factor))
    return replace(a, prompt_tokens=whole * block + rest, output_tokens=output, block_tokens=block)


def _scale(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor))


def capped(arrivals: Sequence[Arrival], max_prompt: int | None, max_output: int | None) -> tuple[list[Arrival], int]:
    """None longer than that, and how many of them were."""
    prompt, output = max_prompt or np.inf, max_output or np.inf
    cut = [
        replace(a, prompt_tokens=int(min(a.prompt_tokens, prompt)), output_tokens=int(min(a.output_tokens, output)))
        for a in arrivals
    ]
    return cut, sum(a != b for a, b in zip(arrivals, cut, strict=True))


class Prompts:
    """Random tokens of a vocabulary without its end tokens; the same seed gives the same ones."""

    def __init__(self, vocab_size: int, end_ids: Sequence[int], seed: int):
        self._ids, self._seed = np.setdiff1d(np.arange(vocab_size), end_ids), seed

    def of(self, number: int, arrival: Arrival) -> list[int]:
        """Of the arrival with this number."""
        if not arrival.blocks:
            return self._draw(PER_REQUEST, number, arrival.prompt_tokens).tolist()
        parts = [self._draw(PER_BLOCK, block, arrival.block_tokens) for block in arrival.blocks]
        return np.concatenate(parts)[: arrival.prompt_tokens].tolist()

    def _draw(self, kind: int, number: int, count: int) -> np.ndarray:
        return np.random.default_rng([self._seed, kind, number]).choice(self._ids, count)
