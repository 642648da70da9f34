"""Arrival times and lengths of requests.

Arrivals are drawn, or read from a trace, before anything is sent: they do not depend on answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.bench.checks import MOST
from jaxserve.errors import ConfigError

REQUESTS = 100  # where neither a number nor a duration is given
# Kinds of random streams, so that lengths and gaps do not depend on each other.
LENGTHS = 0
GAPS = 1
Gaps = Callable[[int], np.ndarray]  # from a number of gaps to the gaps in seconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is to be sent."""

    due: float  # seconds after the start
    prompt_tokens: int  # 0 for a text whose tokens were not counted
    output_tokens: int
    # Numbers of the prompt's blocks of `block_tokens` tokens; equal numbers stand for equal tokens,
    # and the last block may be cut short. A prompt without blocks shares nothing with others.
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Number of tokens, drawn evenly from low to high."""

    low: int
    high: int

    @staticmethod
    def parse(text: str) -> "Lengths":
        """Return the lengths of a text like "128" or "64-256"; ConfigError for other texts."""
        low, dash, high = text.partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= MOST):
            raise ConfigError(
                f"{text!r} is not a length in tokens like 128 or 64-256 (at most {MOST:,})"
            )
        return Lengths(int(low), int(high))

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return rng.integers(self.low, self.high, count, endpoint=True).tolist()


@dataclass(frozen=True, slots=True)
class Process:
    """Process of the arrivals."""

    kind: str  # poisson, constant (evenly), or gamma
    rate: float  # requests/s on average; inf sends all at once
    # Shape of gamma's gaps, whose coefficient of variation is 1 / sqrt(burstiness): 1 is Poisson.
    burstiness: float = 1.0

    def gaps(self, seed: int) -> Gaps:
        """Return the source of gaps; one seed gives the same gaps at every rate, up to scale."""
        mean = 1 / self.rate

        def draw(count: int) -> np.ndarray:
            rng = np.random.default_rng([seed, GAPS])
            if self.kind == "constant":
                return np.full(count, mean)
            if self.kind == "gamma":
                return rng.gamma(self.burstiness, 1.0, count) * (mean / self.burstiness)
            return rng.exponential(1.0, count) * mean

        return draw


def due_times(gaps: Gaps, requests: int | None, seconds: float | None) -> list[float]:
    """Return times in seconds from 0 on: before `seconds`, and at most `requests` of them.

    Without either bound there are REQUESTS times.
    """
    count = requests or REQUESTS
    due = _sums(gaps(count))
    while seconds is not None and requests is None and due[-1] < seconds:
        count *= 2
        due = _sums(gaps(count))
    return due[due < (np.inf if seconds is None else seconds)].tolist()


def _sums(gaps: np.ndarray) -> np.ndarray:
    gaps[:1] = 0.0
    return np.cumsum(gaps)


def drawn(
    due: Sequence[float], prompt: Lengths | None, output: Lengths, seed: int
) -> list[Arrival]:
    """Return arrivals at these times with random lengths, which depend on the seed alone.

    Args:
        prompt: Lengths of the prompts; None for texts, whose lengths are not known.
    """
    rng = np.random.default_rng([seed, LENGTHS])
    outputs = output.draw(rng, len(due))
    prompts = prompt.draw(rng, len(due)) if prompt else [0] * len(due)
    return [Arrival(*row) for row in zip(due, prompts, outputs, strict=True)]


def mean_gap(arrivals: Sequence[Arrival]) -> float:
    """Return the mean gap in seconds; 0 if all come at once, or there is only one."""
    return (arrivals[-1].due - arrivals[0].due) / max(1, len(arrivals) - 1)


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Return the arrivals with their gaps scaled to an average of `rate` requests/s."""
    gap = mean_gap(arrivals)
    if not gap:
        raise ConfigError(
            f"{len(arrivals)} requests that all arrive at once have no rate (raise --requests)"
        )
    return stretched(arrivals, 1 / (rate * gap))


def stretched(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Return the arrivals with gaps times the factor."""
    return [replace(a, due=a.due * factor) for a in arrivals]


def resized(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Return the arrivals with lengths times the factor; shared prefixes stay shared."""
    return [_resized(a, factor) for a in arrivals]


def _resized(a: Arrival, factor: float) -> Arrival:
    # Block by block, and each a whole number of tokens, so that equal blocks stay equal.
    output = _scale(a.output_tokens, factor)
    if not a.blocks:
        return replace(a, prompt_tokens=_scale(a.prompt_tokens, factor), output_tokens=output)
    block = _scale(a.block_tokens, factor)
    whole = len(a.blocks) - 1
    rest = min(block, _scale(a.prompt_tokens - whole * a.block_tokens, factor))
    return replace(a, prompt_tokens=whole * block + rest, output_tokens=output, block_tokens=block)


def _scale(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor))


def capped(
    arrivals: Sequence[Arrival], max_prompt: int | None, max_output: int | None
) -> tuple[list[Arrival], int]:
    """Return the arrivals cut to these lengths, and how many of them were longer."""
    prompt = max_prompt or np.inf
    output = max_output or np.inf
    cut = [
        replace(
            a,
            prompt_tokens=int(min(a.prompt_tokens, prompt)),
            output_tokens=int(min(a.output_tokens, output)),
        )
        for a in arrivals
    ]
    return cut, sum(a != b for a, b in zip(arrivals, cut, strict=True))
