"""Kinds of layers: their attention, what they keep of a token, and groups of alike ones."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import jax.numpy as jnp

from jaxserve.errors import ModelError
from jaxserve.pallas_kernels.paged_attention.api import Layout


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): keys and values from one vector per token."""

    query_rank: int | None  # dimensions of compressed queries; None: queries are not compressed
    rank: int  # dimensions of the compressed vector that pages hold
    head: int  # dimensions of a head's key that are not rotated
    # Rotated dimensions of a key, which all heads share and pages hold beside the vector.
    rotated: int
    value: int  # dimensions of a head's value
    # Checkpoints have the two numbers of a rotated pair beside each other.
    interleaved: bool = True

    def __post_init__(self) -> None:
        for name in ("query_rank", "rank", "head", "rotated", "value"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ModelError(f"latent attention: {name} is {size}; it must be at least 1")

    def sizes(self) -> dict[str, int]:
        """Return the size of the dimensions that only latent attention has, by letter."""
        y = self.query_rank or 0
        i = self.rotated // 2
        return {
            "y": y,
            "m": self.rank,
            "u": self.head,
            "w": self.value,
            "i": i,
            "j": 2,
            "c": y + self.rank + 2 * i,
        }


@dataclass(frozen=True)
class DeltaState:
    """State of a layer with the gated delta rule (Yang et al. 2024), in place of attention.

    The layer keeps, for each value head, a matrix of key_dim x value_dim numbers, and the inputs of
    a short convolution: those of the newest taps - 1 tokens.
    """

    key_heads: int
    value_heads: int
    key_dim: int  # numbers of a query and of a key
    value_dim: int  # numbers of a value
    taps: int  # tokens that an output of the convolution is computed from, its own included

    def __post_init__(self) -> None:
        least = {name: 1 for name in ("key_heads", "value_heads", "key_dim", "value_dim")}
        for name, limit in (least | {"taps": 2}).items():
            size = getattr(self, name)
            if size < limit:
                raise ModelError(f"a layer's state: {name} is {size}; it must be at least {limit}")
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"a layer's state: {self.value_heads} value heads do not divide by "
                f"{self.key_heads} key heads"
            )

    def sizes(self) -> dict[str, int]:
        """Return the size of the dimensions that only layers with a state have, by letter."""
        r = self.value_heads // self.key_heads
        f = 2 * self.key_dim + r * self.value_dim
        return {
            "k": self.key_heads,
            "r": r,
            "d": self.key_dim,
            "v": self.value_dim,
            "f": f,
            "e": f + r * self.value_dim,
            "b": 2 * r,
            "t": self.taps,
        }


@dataclass(frozen=True)
class ConvState:
    """State of a layer that is a short convolution, in place of attention (LFM2).

    The layer keeps the convolution's inputs of the newest taps - 1 tokens.
    """

    heads: int  # parts of the inputs that devices do not split
    channels: int  # inputs of a head
    taps: int  # tokens that an output is computed from, its own included

    def __post_init__(self) -> None:
        for name, limit in {"heads": 1, "channels": 1, "taps": 2}.items():
            size = getattr(self, name)
            if size < limit:
                raise ModelError(f"a layer's state: {name} is {size}; it must be at least {limit}")

    def sizes(self) -> dict[str, int]:
        """Return the size of the dimensions that only layers with a state have, by letter."""
        f = self.channels
        return {"k": self.heads, "f": f, "e": 3 * f, "t": self.taps}


LayerState = DeltaState | ConvState


@dataclass(frozen=True)
class LayerKind:
    """Attention of one layer or its state, and what the layer keeps of a sequence.

    Raises ModelError for sizes that are too small, for latent attention without a rope, and for a
    layer with a state that has anything else.
    """

    window: int | None = None  # tokens that a query sees, including its own; None: all before it
    latent: Latent | None = None  # None: attention over the model's heads
    kv_heads: int | None = None  # of what the layer keeps; None: the model's
    head_dim: int | None = None  # of what the layer keeps; None: the model's
    v_dim: int | None = None  # numbers of a kept value; None: as many as of a key; 0: keys alone
    # Earlier layer whose keys and values this layer reads, in place of any of its own.
    entries_of: int | None = None
    # One state per sequence, in a slot, and nothing of single tokens; None for attention.
    state: LayerState | None = None
    rope: bool = True  # False: queries and keys are not rotated

    def __post_init__(self) -> None:
        least = {"window": 1, "kv_heads": 1, "head_dim": 1, "v_dim": 0, "entries_of": 0}
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise ModelError(f"a layer's {name} is {value}; it must be at least {limit}")
        if self.latent and not self.rope:
            raise ModelError("latent attention without a rope is not implemented")
        names = {field.name for field in fields(self)} - {"state", "rope"}
        others = [getattr(self, name) for name in names]
        if self.state and any(value is not None for value in others):
            raise ModelError(f"a layer that keeps one state per sequence keeps no tokens: {self}")

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the fields in which the layer's entries are not simply the model's."""
        names = ("kv_heads", "head_dim", "v_dim", "entries_of")
        return tuple(name for name in names if getattr(self, name) is not None)


def windowed(windows: Iterable[int | None]) -> tuple[LayerKind, ...]:
    """Return layers that differ in nothing but their windows."""
    return tuple(LayerKind(window=window) for window in windows)


@dataclass(frozen=True)
class PageGroup:
    """Layers that share a page table, because they keep the same tokens of a sequence.

    A page of the group holds, in each of the layers, keys and values of page_size tokens: kv_heads
    heads of head_dim.
    """

    layers: tuple[int, ...]
    window: int | None  # tokens that a query sees, including its own; None: all before it
    kv_heads: int
    head_dim: int
    # Set for pages that keep keys alone (paged_attention.api.Layout), such as latent ones: every
    # shard holds all of their heads.
    value_dim: int | None = None
    v_dim: int | None = None  # numbers of a kept value, where they are not head_dim
    copies: int = 1  # of each kv head of the checkpoint, see ModelSpec.kv_copies

    def layout(self, page_size: int, dtype: jnp.dtype, shards: int = 1) -> Layout:
        """Return the layout of one layer's pages on one of the shards that split its heads.

        ModelError for pages that no attention kernel has.
        """
        if self.v_dim is not None:
            raise ModelError(
                f"layers {self.layers} keep keys of {self.head_dim} numbers and values of "
                f"{self.v_dim}; attention kernels have one width for both"
            )
        heads = self.kv_heads
        if self.value_dim is None:
            heads //= shards
        return Layout(heads, self.head_dim, page_size, dtype, self.value_dim)
