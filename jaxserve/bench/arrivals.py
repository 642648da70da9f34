"""When requests arrive, and how long they are.

Nothing here waits for an answer: arrivals are drawn, or read from a trace, before anything is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.bench.checks import MOST
from jaxserve.errors import ConfigError

REQUESTS = 100  # where neither a number nor a duration is given
LENGTHS, GAPS = 0, 1  # kinds of random streams
Gaps = Callable[[int], np.ndarray]  # so many of them, in seconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """due: seconds after the start. The other sizes are tokens.

    prompt_tokens: 0 of a text whose tokens nobody counted. blocks: numbers of the prompt's blocks
    of `block_tokens`, of which the last may be cut short. Equal numbers stand for equal tokens.
    Without any, the prompt is like no other.
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
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= MOST):
            raise ConfigError(
                f"{text!r} is not a length in tokens like 128 or 64-256 (at most {MOST:,})"
            )
        return Lengths(int(low), int(high))

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return rng.integers(self.low, self.high, count, endpoint=True).tolist()


@dataclass(frozen=True, slots=True)
class Process:
    """How requests come: poisson, constant (evenly), or gamma. rate: requests/s on average; inf:
    all at once.

    burstiness: shape of gamma's gaps, whose coefficient of variation is 1 / sqrt(burstiness): 1 is
    Poisson.
    """

    kind: str
    rate: float
    burstiness: float = 1.0

    def gaps(self, seed: int) -> Gaps:
        """A seed gives the same gaps at every rate, but for the scale."""
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
    """From 0 on, before `seconds`, and no more than `requests`; without either, REQUESTS of
    them."""
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
    """With lengths of that spread; the same seed gives the same ones whenever they are due. prompt
    None: of texts.
    """
    rng = np.random.default_rng([seed, LENGTHS])
    outputs = output.draw(rng, len(due))
    prompts = prompt.draw(rng, len(due)) if prompt else [0] * len(due)
    return [Arrival(*row) for row in zip(due, prompts, outputs, strict=True)]


def mean_gap(arrivals: Sequence[Arrival]) -> float:
    """Seconds; 0 when all come at once, or there is but one."""
    return (arrivals[-1].due - arrivals[0].due) / max(1, len(arrivals) - 1)


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same bursts, so much faster or slower that on average `rate` requests arrive in a
    second."""
    if not (gap := mean_gap(arrivals)):
        raise ConfigError(
            f"{len(arrivals)} requests that all arrive at once have no rate (raise --requests)"
        )
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


def capped(
    arrivals: Sequence[Arrival], max_prompt: int | None, max_output: int | None
) -> tuple[list[Arrival], int]:
    """None longer than that, and how many of them were."""
    prompt, output = max_prompt or np.inf, max_output or np.inf
    cut = [
        replace(
            a,
            prompt_tokens=int(min(a.prompt_tokens, prompt)),
            output_tokens=int(min(a.output_tokens, output)),
        )
        for a in arrivals
    ]
    return cut, sum(a != b for a, b in zip(arrivals, cut, strict=True))
