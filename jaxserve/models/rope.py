"""Rotary position embedding: frequencies of the published scalings, and their application.

Su et al. 2021 (RoFormer); Chen et al. 2023 (linear); Peng et al. 2023 (YaRN); Ding et al. 2024
(LongRoPE); Llama 3.1's piecewise scaling.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.errors import ModelError


@dataclass(frozen=True)
class Rope:
    """Unscaled rotary embedding; subclasses scale it."""

    theta: float = 10000.0  # base of the frequencies
    # Share of a head's dimensions that are rotated, which are the first ones.
    rotated: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        """Raise ModelError for numbers that give no frequencies."""
        for name, value in vars(self).items():
            if value is None or isinstance(value, bool | tuple):
                continue
            if name.startswith("mscale") and value == 0:  # published as "without"
                continue
            if not 0 < value < math.inf:
                raise ModelError(f"rope: {name} is {value}; it must be a positive number")
        if self.theta <= 1:
            raise ModelError(f"rope: theta is {self.theta}; it must be more than 1")
        if self.rotated > 1:
            raise ModelError(
                f"rope: {self.rotated} of the dimensions are rotated; it must be at most 1"
            )

    def dimensions(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated."""
        return int(head_dim * self.rotated)

    def check(self, head_dim: int, max_positions: int) -> None:
        """Raise ModelError when the rope does not support heads or positions of this number."""
        if self.dimensions(head_dim) % 2:
            raise ModelError(f"rope: {self.rotated} of {head_dim} dimensions are not pairs")

    def check_frequencies(self, head_dim: int) -> None:
        """Raise ModelError for numbers that give no positive float32 frequencies and factor."""
        try:
            with np.errstate(all="ignore"):
                found = [*self.inverse_frequencies(head_dim), self.attention_factor]
        except (OverflowError, ZeroDivisionError, ValueError):
            found = [math.inf]
        with np.errstate(over="ignore"):
            numbers = np.asarray(found, np.float32)
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise ModelError(f"rope: {self} gives frequencies that are no positive float32 numbers")

    def base(self, head_dim: int) -> np.ndarray:
        """Return theta^(-2i/d) for i < d/2 as float64, where d = dimensions(head_dim)."""
        d = self.dimensions(head_dim)
        return self.theta ** -(np.arange(0, d, 2, dtype=np.float64) / d)

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Return the radians per position of each rotated pair of dimensions, [d/2] float32."""
        return self.base(head_dim).astype(np.float32)

    @property
    def attention_factor(self) -> float:
        """Factor of cos and sin."""
        return 1.0


@dataclass(frozen=True)
class LinearRope(Rope):
    """Linear interpolation (Chen et al. 2023): all frequencies are divided by factor."""

    factor: float = 1.0

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        return (self.base(head_dim) / self.factor).astype(np.float32)


@dataclass(frozen=True)
class NtkRope(Rope):
    """NTK-aware scaling by a fixed factor, as of Hunyuan: theta times alpha^(d / (d - 2)).

    d is the number of rotated dimensions; the lowest frequency becomes alpha times lower.
    """

    alpha: float = 1.0

    def check(self, head_dim: int, max_positions: int) -> None:
        super().check(head_dim, max_positions)
        if self.dimensions(head_dim) <= 2:
            raise ModelError("rope: alpha needs more than one pair of rotated dimensions")

    def base(self, head_dim: int) -> np.ndarray:
        d = self.dimensions(head_dim)
        theta = self.theta * self.alpha ** (d / (d - 2))
        return theta ** -(np.arange(0, d, 2, dtype=np.float64) / d)


@dataclass(frozen=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling: low frequencies are divided by factor, high ones kept.

    Frequencies between the two bounds are interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0  # lower bound, in rotations over original_context
    high_freq_factor: float = 4.0  # upper bound, in rotations over original_context
    original_context: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor >= self.high_freq_factor:
            raise ModelError(
                f"rope: low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
                f"{self.high_freq_factor}"
            )

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        base = self.base(head_dim)
        turns = self.original_context * base / (2 * math.pi)  # rotations over the original context
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0, 1)
        return (keep * base + (1 - keep) * base / self.factor).astype(np.float32)


@dataclass(frozen=True)
class YarnRope(Rope):
    """YaRN (Peng et al. 2023): frequencies between beta_slow and beta_fast are interpolated.

    The bounds are rotations over original_context; truncate rounds them to whole dimensions.
    """

    factor: float = 1.0
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scale: float | None = None  # the checkpoint's attention_factor
    # Fields of DeepSeek from which the attention factor follows otherwise.
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        base = self.base(head_dim)
        d = self.dimensions(head_dim)
        low = self._dimension(self.beta_fast, d)
        high = self._dimension(self.beta_slow, d)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, d - 1)
        ramp = (np.arange(d // 2) - low) / ((high - low) or 0.001)
        keep = 1 - np.clip(ramp, 0, 1)
        return (keep * base + (1 - keep) * base / self.factor).astype(np.float32)

    def _dimension(self, rotations: float, d: int) -> float:
        """Return the pair of dimensions with this many rotations over the original context."""
        return (
            d
            * math.log(self.original_context / (rotations * 2 * math.pi))
            / (2 * math.log(self.theta))
        )

    @property
    def attention_factor(self) -> float:
        if self.attention_scale is not None:
            return self.attention_scale
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def score_factor(self) -> float:
        """Further factor of the attention scores in DeepSeek's models."""
        magnitude = self._magnitude(self.mscale_all_dim) if self.mscale_all_dim else 1.0
        return magnitude * magnitude

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class LongRope(Rope):
    """LongRoPE (Ding et al. 2024) within the original context, with the short factors.

    Every pair of dimensions has a factor of its own. Beyond the original context transformers
    switches to the long factors for the whole sequence; this runtime's context ends there.
    """

    short_factors: tuple[float, ...] = ()
    factor: float = 1.0  # by which training extended the original context
    original_context: int = 4096
    attention_scale: float | None = None

    def check(self, head_dim: int, max_positions: int) -> None:
        super().check(head_dim, max_positions)
        if max_positions > self.original_context:
            raise ModelError(
                "rope: longrope is implemented within its original context of "
                f"{self.original_context}, not for {max_positions} positions"
            )
        pairs = self.dimensions(head_dim) // 2
        if len(self.short_factors) != pairs:
            raise ModelError(
                f"rope: {len(self.short_factors)} factors for {pairs} pairs of rotated dimensions"
            )

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        return (self.base(head_dim) / np.asarray(self.short_factors)).astype(np.float32)

    @property
    def attention_factor(self) -> float:
        if self.attention_scale is not None:
            return self.attention_scale
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))


@dataclass(frozen=True)
class QueryGrowth:
    """Factor of queries that grows with their position p: 1 + beta log(1 + floor(p / length)).

    Llama 4's temperature of attention in long contexts, which Ministral 3 has too.
    """

    beta: float
    length: int  # tokens

    def __post_init__(self) -> None:
        if not (0 < self.beta < math.inf and self.length > 0):
            raise ModelError(
                f"queries that grow by {self.beta} every {self.length} positions; both numbers "
                "must be positive"
            )

    def factors(self, positions: Int[Array, "T"]) -> Float[Array, "T"]:
        """Return the float32 factor of the query at each position."""
        return 1 + self.beta * jnp.log1p((positions // self.length).astype(jnp.float32))


def tables(
    rope: Rope, head_dim: int, positions: Int[Array, "T"]
) -> tuple[Float[Array, "T n"], Float[Array, "T n"]]:
    """Return the float32 cos and sin of every position's rotation."""
    angles = positions[:, None].astype(jnp.float32) * rope.inverse_frequencies(head_dim)[None]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(
    x: Float[Array, "T N H"], cos: Float[Array, "T n"], sin: Float[Array, "T n"]
) -> Float[Array, "T N H"]:
    """Rotate dimension i with dimension i + n for i < n, as Hugging Face checkpoints have them."""
    n = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (n, 2 * n), axis=-1)
    cos = cos[:, None]
    sin = sin[:, None]
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
    )
    return jax.lax.convert_element_type(rotated, x.dtype)
