"""ModelSpec: the architecture of a checkpoint and nothing else (the operator's choices are in jaxserve.config)."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import jax.numpy as jnp

from jaxserve.errors import ModelError
from jaxserve.models.rope import Rope
from pallas_kernels.paged_attention.api import Layout


@dataclass(frozen=True)
class PageGroup:
    """Layers that share a page table, because they keep the same tokens of a sequence.

    A page of the group holds page_size tokens of K heads of head_dim for keys and for values, in every layer of it.
    window: how many tokens a query sees, itself among them; None: all before it.
    """

    layers: tuple[int, ...]
    window: int | None
    kv_heads: int
    head_dim: int

    def layout(self, page_size: int, dtype: jnp.dtype, shards: int = 1) -> Layout:
        """Of one layer's pages; of one shard's heads, where the heads are split."""
        return Layout(self.kv_heads // shards, self.head_dim, page_size, dtype)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder. Field names follow the legend in sharding/rules.py."""

    family: str
    vocab_size: int  # V
    d_model: int  # D
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    d_mlp: int  # F
    norm_eps: float
    max_positions: int
    rope: Rope = field(default_factory=Rope)
    windows: tuple[int | None, ...] = ()  # of each layer, as in its config; empty: no layer has one
    window_rope: Rope | None = None  # of the layers with a window, where it is another
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norms: Literal["before", "after", "around"] = "before"  # where the norms of attention and MLP stand
    norm_plus_one: bool = False  # a norm multiplies by 1 + weight
    norm_rounds_last: bool = False  # a norm's product with its weight is in float32 (that with 1 + weight always)
    qk_norm: Literal["none", "head", "whole"] = "none"  # norms of queries and keys: each head, or all heads together
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the gated MLP
    embed_scale: float = 1.0
    attn_scale: float | None = None  # of the scores; None: head_dim^-0.5
    attn_softcap: float | None = None  # scores s become cap * tanh(s / cap)
    final_softcap: float | None = None  # the same for logits

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "d_model",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "d_mlp",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"norm_eps is {self.norm_eps}; it must be a small positive number")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads do not divide by {self.num_kv_heads} kv heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")
        for rope in filter(None, (self.rope, self.window_rope)):
            rope.check(self.head_dim, self.max_positions)
        if len(self.windows) not in (0, self.num_layers):
            raise ModelError(f"{len(self.windows)} windows for {self.num_layers} layers")
        for name in ("attn_scale", "attn_softcap", "final_softcap", "embed_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ModelError(f"{name} is {value}; it must be a positive number")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError(f"windows are {self.windows}; each must be at least 1 token")

    def sizes(self) -> dict[str, int]:
        """Size of every dimension that a weight can have, by letter."""
        return {
            "V": self.vocab_size,
            "D": self.d_model,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "G": self.num_heads // self.num_kv_heads,
            "Q": self.num_heads // self.num_kv_heads + 2,
            "H": self.head_dim,
            "F": self.d_mlp,
            "C": 2,
        }

    def on(self, tensor: int) -> "ModelSpec":
        """The same model on `tensor` devices that split its heads.

        With fewer kv heads than devices, as many devices as it takes have a copy of each, and share its queries out.
        Unchanged where that does not come out even: sharding.rules says what does.
        """
        spread = tensor > self.num_kv_heads and tensor % self.num_kv_heads == 0 and self.num_heads % tensor == 0
        return replace(self, num_kv_heads=tensor) if spread else self

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attn_scale is None else self.attn_scale

    def page_groups(self) -> tuple[PageGroup, ...]:
        """One group for the layers of each window, in the order in which they come.

        A window that the longest sequence fits in is none.
        """
        narrow = (w if w is not None and w < self.max_positions else None for w in self.windows)
        windows = tuple(narrow) or (None,) * self.num_layers
        layers = {w: tuple(i for i, window in enumerate(windows) if window == w) for w in windows}
        return tuple(PageGroup(its, window, self.num_kv_heads, self.head_dim) for window, its in layers.items())
