"""ModelSpec: the architecture of a checkpoint.

The operator's choices are in jaxserve.config.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from jaxserve.errors import ModelError
from jaxserve.models.layer_kind import Latent, LayerKind, LayerState, PageGroup
from jaxserve.models.mixture import Mixture
from jaxserve.models.rope import QueryGrowth, Rope

# Fields of ModelSpec that must be at least 1.
POSITIVE: Final = tuple(
    "vocab_size d_model num_layers num_heads num_kv_heads head_dim d_mlp max_positions".split()
)
# Fields of ModelSpec that must be positive numbers where they are not None.
POSITIVE_FACTORS: Final = tuple(
    "attn_scale attn_softcap final_softcap embed_scale residual_scale logit_divisor".split()
)


@dataclass(frozen=True)
class ModelSpec:
    """The architecture of a decoder; the letters are those of the legend in sharding/rules.py.

    Lengths and sizes count dimensions or tokens. With latent attention, head_dim is that of
    queries, and num_kv_heads is 1.
    """

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
    # Kind of each layer as its config gives it; empty where every layer is LayerKind().
    layers: tuple[LayerKind, ...] = ()
    window_rope: Rope | None = None  # of the layers with a window, if they have their own
    tied_head: bool = False
    embeds: bool = False  # the answer is the last token's hidden state; there is no head
    qkv_bias: bool = False  # with latent attention: of the compressed vectors
    out_bias: bool = False
    mlp_bias: bool = False
    norms: Literal["before", "after", "around"] = "before"  # relative to attention and MLP
    norm_plus_one: bool = False  # a norm multiplies by 1 + weight
    norm_rounds_last: bool = False  # a norm is rounded after the product with its weight
    # Norms of queries and keys, for each head or for all heads together.
    qk_norm: Literal["none", "head", "whole"] = "none"
    qk_norm_after_rope: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped"] = "silu"  # of the gated MLP
    activation_limit: float = 0.0  # of the clamped activation
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # factor of what attention and MLP add to the residual stream
    logit_divisor: float = 1.0  # of the head's product, before the soft cap
    attn_scale: float | None = None  # factor of the scores; None: head_dim^-0.5
    query_growth: QueryGrowth | None = None  # factor of queries by their position
    attn_softcap: float | None = None  # scores s become cap * tanh(s / cap)
    final_softcap: float | None = None  # the same for logits
    sinks: bool = False  # a score per query head that takes part in the softmax and has no value
    # What attention returns is multiplied by the sigmoid of gates, which the layer's input gives.
    attn_gate: bool = False
    mixture: Mixture | None = None
    # What ends the context at max_positions, where it ends before max_position_embeddings.
    context_note: str = ""
    kv_copies: int = 1  # of each kv head of the checkpoint, adjacent among the kv heads (see `on`)

    def __post_init__(self) -> None:
        for name in POSITIVE:
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
            rope.check_frequencies(self.rope_dim)
        self._check_layers()
        if (self.activation == "clamped") != (0 < self.activation_limit < math.inf):
            raise ModelError(f"activation {self.activation} with the limit {self.activation_limit}")
        if self.mixture and not set(self.mixture.layers) <= set(range(self.num_layers)):
            raise ModelError(
                f"layers {self.mixture.layers} have experts, of {self.num_layers} layers"
            )
        for name in POSITIVE_FACTORS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ModelError(f"{name} is {value}; it must be a positive number")

    def _check_layers(self) -> None:
        if len(self.layers) not in (0, self.num_layers):
            raise ModelError(
                f"{len(self.layers)} layers are described; the model has {self.num_layers}"
            )
        latents = {kind.latent for kind in self.layers if kind.latent}
        if len(latents) > 1:
            raise ModelError(f"layers differ in the sizes of latent attention: {latents}")
        states = {kind.state for kind in self.layers if kind.state}
        if len(states) > 1:
            raise ModelError(f"layers differ in the sizes of their states: {states}")
        if states and not self.page_groups():
            raise ModelError("a model whose layers all have a state is not implemented")
        if latents and self.attn_gate:
            raise ModelError("latent attention has no gates")
        if latents and self.query_growth:
            raise ModelError("latent attention has no queries that grow with their position")
        if self.query_growth and not all(kind.rope for kind in self.layers):
            raise ModelError("layers without a rope have no queries that grow with their position")
        for latent in latents:
            if (self.num_kv_heads, self.head_dim) != (1, latent.head + latent.rotated):
                raise ModelError(
                    f"latent attention with {self.num_kv_heads} kv heads of {self.head_dim}"
                )
        for layer, kind in enumerate(self.layers):
            owner = kind.entries_of
            if owner is None:
                continue
            earlier = self.layers[:layer][owner : owner + 1]
            if not any(kind.entries_of is None and not kind.state for kind in earlier):
                raise ModelError(
                    f"layer {layer} reads the entries of layer {owner}, which must be an earlier "
                    f"one that has entries"
                )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return self.layers or (LayerKind(),) * self.num_layers

    @property
    def latent(self) -> Latent | None:
        """Sizes of latent attention, which its layers have in common; None without such layers."""
        return next((kind.latent for kind in self.layers if kind.latent), None)

    @property
    def state(self) -> LayerState | None:
        """Sizes of the layers' states, which they have in common; None without such layers."""
        return next((kind.state for kind in self.layers if kind.state), None)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep one state per sequence."""
        return tuple(layer for layer, kind in enumerate(self.layers) if kind.state)

    def sizes(self, block: str = "") -> dict[str, int]:
        """Return the size of every dimension that a weight can have, by letter.

        Args:
            block: Nested block of the weight, if it is in "experts" or "shared", whose F differs.
        """
        pairs = self.rope.dimensions(self.head_dim) // 2
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
            "i": pairs,
            "j": 2,
            "h": self.head_dim - 2 * pairs,
        }
        latent = self.latent.sizes() if self.latent else {}
        state = self.state.sizes() if self.state else {}
        mixture = self.mixture.sizes(block) if self.mixture else {}
        return dense | latent | state | mixture

    def on(self, tensor: int) -> "ModelSpec":
        """Return the spec as `tensor` devices hold it, which split the heads among them.

        With fewer kv heads than devices, several devices get a copy of each kv head and divide its
        queries among them. The spec is unchanged where heads do not divide so; the mesh is then
        refused by jaxserve.sharding.rules.
        """
        if self.latent:  # every device has the one head
            return self
        spread = (
            tensor > self.num_kv_heads
            and tensor % self.num_kv_heads == 0
            and self.num_heads % tensor == 0
        )
        if not spread:
            return self
        return replace(self, num_kv_heads=tensor, kv_copies=tensor // self.num_kv_heads)

    @property
    def single(self) -> "ModelSpec":
        """Spec of the checkpoint: one copy of each kv head, as on one device."""
        return replace(self, num_kv_heads=self.num_kv_heads // self.kv_copies, kv_copies=1)

    @property
    def has_head(self) -> bool:
        """True if the model has a weight for logits apart from the embedding."""
        return not (self.tied_head or self.embeds)

    def has_experts(self, layer: int) -> bool:
        return self.mixture is not None and layer in self.mixture.layers

    @property
    def rope_dim(self) -> int:
        """Number of a head's dimensions that the rope applies to."""
        return self.latent.rotated if self.latent else self.head_dim

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attn_scale is None else self.attn_scale

    def page_groups(self) -> tuple[PageGroup, ...]:
        """Return the groups of layers that keep pages alike, in order of first appearance.

        Layers of a group have the same window, and entries of the same sizes. A window as long as
        the longest sequence or longer counts as none.
        """
        layers: dict[PageGroup, list[int]] = {}
        for layer, kind in enumerate(self.kinds):
            if kind.entries_of is None and not kind.state:
                layers.setdefault(self._entries(kind), []).append(layer)
        return tuple(replace(group, layers=tuple(own)) for group, own in layers.items())

    @property
    def slot_groups(self) -> int:
        """Number of groups of layers that keep one state per sequence: 1 if there are such layers.

        They come behind the page groups.
        """
        return int(self.state is not None)

    @property
    def num_groups(self) -> int:
        """Number of groups of layers that have a table of their own for each sequence."""
        return len(self.page_groups()) + self.slot_groups

    def _entries(self, kind: LayerKind) -> PageGroup:
        """Return the group of a layer of this kind, without its layers."""
        window = kind.window
        if window is not None and window >= self.max_positions:
            window = None
        if kind.latent:
            width = kind.latent.rank + kind.latent.rotated
            return PageGroup((), window, 1, width, value_dim=kind.latent.rank)
        width = kind.head_dim or self.head_dim
        heads = kind.kv_heads or self.num_kv_heads
        if kind.v_dim == 0:
            return PageGroup((), window, heads, width, value_dim=0)
        values = None if kind.v_dim == width else kind.v_dim
        copies = self.kv_copies if kind.kv_heads is None else 1
        return PageGroup((), window, heads, width, v_dim=values, copies=copies)
