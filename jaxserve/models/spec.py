"""ModelSpec: the architecture of a checkpoint and nothing else (the operator's choices are in
jaxserve.config).
"""

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

    A page of the group holds page_size tokens of K heads of head_dim for keys and for values, in
    every layer of it. window: how many tokens a query sees, itself among them; None: all before it.
    value_dim: of latent pages, see paged_attention.api.Layout; their one head is not split but on
    every shard.
    """

    layers: tuple[int, ...]
    window: int | None
    kv_heads: int
    head_dim: int
    value_dim: int | None = None

    def layout(self, page_size: int, dtype: jnp.dtype, shards: int = 1) -> Layout:
        """Of one layer's pages; of one shard's heads, where the heads are split."""
        heads = self.kv_heads if self.value_dim else self.kv_heads // shards
        return Layout(heads, self.head_dim, page_size, dtype, self.value_dim)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, Liu et al. 2024): keys and values from one
    compressed vector per token.

    query_rank: of compressed queries; None: they are not. rank: of the vector that pages hold,
    beside rotated dimensions that all heads share. head: dimensions of a head's key that are not
    rotated; value: of its value.
    """

    query_rank: int | None
    rank: int
    head: int
    rotated: int
    value: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is not None and size < 1:
                raise ModelError(f"latent attention: {name} is {size}; it must be at least 1")


@dataclass(frozen=True)
class Mixture:
    """MLPs of which every token takes a few (Shazeer et al. 2017), beside one that all take.

    layers: those that have it; the others have a plain MLP. d_expert, d_shared: F of one expert,
    and of what all take (0: nothing). A token's scores are the softmax or sigmoid of its logits; it
    takes the `taken` best experts of its groups_taken best groups, a group judged by its `judges`
    best. An expert's answer is weighed with its score, divided by the sum of those taken if
    normalized, times scale. corrected: a learned bias takes part in the choice but not in the
    weights (DeepSeek-V3). shared_gate: what all take is multiplied by the sigmoid of one logit.
    """

    experts: int  # E
    taken: int  # X
    d_expert: int
    layers: tuple[int, ...]
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_taken: int = 1
    judges: int = 1
    corrected: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    d_shared: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if self.d_expert < 1 or not self.layers:
            raise ModelError(
                f"a mixture with experts of size {self.d_expert} in {len(self.layers)} layers"
            )
        if self.groups < 1 or self.experts % self.groups:
            raise ModelError(f"{self.experts} experts do not divide into {self.groups} groups")
        if not 1 <= self.groups_taken <= self.groups:
            raise ModelError(f"{self.groups_taken} of {self.groups} groups of experts are taken")
        if not 1 <= self.taken <= self.experts // self.groups * self.groups_taken:
            raise ModelError(
                f"{self.taken} experts per token are more than {self.groups_taken} of "
                f"{self.groups} groups "
                f"of {self.experts} experts have"
            )
        if not 1 <= self.judges <= self.experts // self.groups:
            raise ModelError(
                f"groups of {self.experts // self.groups} experts are judged by {self.judges} of "
                f"them"
            )
        if not 0 < self.scale < math.inf:
            raise ModelError(
                f"the scale of the experts' weights is {self.scale}; it must be a positive number"
            )


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
    embeds: bool = False  # no head: the answer is the last token's hidden state
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norms: Literal["before", "after", "around"] = (
        "before"  # where the norms of attention and MLP stand
    )
    norm_plus_one: bool = False  # a norm multiplies by 1 + weight
    norm_rounds_last: bool = (
        False  # a norm's product with its weight is in float32 (that with 1 + weight always)
    )
    qk_norm: Literal["none", "head", "whole"] = (
        "none"  # norms of queries and keys: each head, or all heads together
    )
    activation: Literal["silu", "gelu_tanh", "clamped"] = "silu"  # of the gated MLP
    activation_limit: float = 0.0  # of a clamped one
    embed_scale: float = 1.0
    attn_scale: float | None = None  # of the scores; None: head_dim^-0.5
    attn_softcap: float | None = None  # scores s become cap * tanh(s / cap)
    final_softcap: float | None = None  # the same for logits
    sinks: bool = False  # a score per query head that takes part in the softmax and has no value
    latent: Latent | None = None  # head_dim is then that of queries, num_kv_heads 1
    mixture: Mixture | None = None
    kv_copies: int = (
        1  # of each kv head of the checkpoint, one after the other among num_kv_heads (see on)
    )

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
            raise ModelError(
                f"{self.num_heads} query heads do not divide by {self.num_kv_heads} kv heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")
        for rope in filter(None, (self.rope, self.window_rope)):
            rope.check(self.rope_dim, self.max_positions)
        if len(self.windows) not in (0, self.num_layers):
            raise ModelError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if (self.activation == "clamped") != (0 < self.activation_limit < math.inf):
            raise ModelError(f"activation {self.activation} with the limit {self.activation_limit}")
        if self.mixture and not set(self.mixture.layers) <= set(range(self.num_layers)):
            raise ModelError(
                f"layers {self.mixture.layers} have experts, of {self.num_layers} layers"
            )
        if self.latent and (self.num_kv_heads, self.head_dim) != (
            1,
            self.latent.head + self.latent.rotated,
        ):
            raise ModelError(
                f"latent attention with {self.num_kv_heads} kv heads of {self.head_dim}"
            )
        for name in ("attn_scale", "attn_softcap", "final_softcap", "embed_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ModelError(f"{name} is {value}; it must be a positive number")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError(f"windows are {self.windows}; each must be at least 1 token")

    def sizes(self, block: str = "") -> dict[str, int]:
        """Size of every dimension that a weight can have, by letter.

        block: experts or shared, for what a layer has there: their F is another.
        """
        dense = {
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
        return dense | self._latent_sizes() | self._mixture_sizes(block)

    def _latent_sizes(self) -> dict[str, int]:
        if self.latent is None:
            return {}
        y, m, i = self.latent.query_rank or 0, self.latent.rank, self.latent.rotated // 2
        return {
            "y": y,
            "m": m,
            "u": self.latent.head,
            "w": self.latent.value,
            "i": i,
            "j": 2,
            "c": y + m + 2 * i,
        }

    def _mixture_sizes(self, block: str) -> dict[str, int]:
        if self.mixture is None:
            return {}
        counts = {"E": self.mixture.experts, "O": self.mixture.experts}
        inner = {"experts": self.mixture.d_expert, "shared": self.mixture.d_shared}
        return counts | ({"F": inner[block]} if block in inner else {})

    def on(self, tensor: int) -> "ModelSpec":
        """The same model on `tensor` devices that split its heads.

        With fewer kv heads than devices, as many devices as it takes have a copy of each, and share
        its queries out. Unchanged where that does not come out even: sharding.rules says what does.
        """
        if self.latent:  # one vector for all heads, on every device
            return self
        spread = (
            tensor > self.num_kv_heads
            and tensor % self.num_kv_heads == 0
            and self.num_heads % tensor == 0
        )
        return (
            replace(self, num_kv_heads=tensor, kv_copies=tensor // self.num_kv_heads)
            if spread
            else self
        )

    @property
    def single(self) -> "ModelSpec":
        """The same with one copy of each kv head, as on one device."""
        return replace(self, num_kv_heads=self.num_kv_heads // self.kv_copies, kv_copies=1)

    @property
    def has_head(self) -> bool:
        """Whether it has a weight for logits that is not the embedding's."""
        return not (self.tied_head or self.embeds)

    def has_experts(self, layer: int) -> bool:
        return self.mixture is not None and layer in self.mixture.layers

    @property
    def rope_dim(self) -> int:
        """How many dimensions of a head the rope is given."""
        return self.latent.rotated if self.latent else self.head_dim

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
        if self.latent:
            width, value = self.latent.rank + self.latent.rotated, self.latent.rank
        else:
            width, value = self.head_dim, None
        return tuple(
            PageGroup(its, window, self.num_kv_heads, width, value)
            for window, its in layers.items()
        )
