"""The one decoder: its parameters, and the way from token ids to hidden states to logits.

Layers are unrolled, one leaf per weight and layer: a scan over stacked weights copies every layer's weights each step.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.models.attention import Attend, Rotation, norm, self_attention
from jaxserve.models.layers import einsum, softcap
from jaxserve.models.mlp import gated_mlp
from jaxserve.models.rope import tables
from jaxserve.models.spec import ModelSpec
from pallas_kernels.paged_attention.api import Pages
from sharding.params import ParamSpec

PROJECTIONS = {"qkv": "DKQH", "o": "NHD", "gate_up": "DCF", "down": "FD"}
NORMS = {
    "before": ("attn_norm", "mlp_norm"),
    "after": ("attn_out_norm", "mlp_out_norm"),
    "around": ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"),
}
QK_NORMS = {"none": {}, "head": {"q_norm": "H", "k_norm": "H"}, "whole": {"q_norm": "NH", "k_norm": "KH"}}


def layer_axes(spec: ModelSpec) -> dict[str, str]:
    """Name -> axes of one layer's parameters."""
    axes = PROJECTIONS | dict.fromkeys(NORMS[spec.norms], "D") | QK_NORMS[spec.qk_norm]
    if spec.qkv_bias:
        axes |= {"qkv_bias": "KQH"}
    if spec.out_bias:
        axes |= {"o_bias": "D"}
    if spec.mlp_bias:
        axes |= {"gate_up_bias": "CF", "down_bias": "D"}
    return axes


def param_specs(spec: ModelSpec, dtype: jnp.dtype) -> dict:
    """{"embed", "layers": [one dict per layer], "norm", "head" unless tied}, a ParamSpec each."""
    layer = layer_axes(spec)
    specs: dict = {
        "embed": _spec(spec, "VD", dtype),
        "layers": [
            {name: _spec(spec, axes, dtype, name) for name, axes in layer.items()} for _ in range(spec.num_layers)
        ],
        "norm": _spec(spec, "D", dtype, "norm"),
    }
    return specs if spec.tied_head else specs | {"head": _spec(spec, "DV", dtype)}


def _spec(spec: ModelSpec, axes: str, dtype: jnp.dtype, name: str = "") -> ParamSpec:
    shape = tuple(spec.sizes()[letter] for letter in axes)
    return ParamSpec(axes, shape, dtype, mean=1.0 if name.endswith("norm") and not spec.norm_plus_one else 0.0)


def forward(
    params: dict,
    spec: ModelSpec,
    pages: tuple[Pages, ...],
    tokens: Int[Array, "T"],
    positions: Int[Array, "T"],
    attends: tuple[Attend, ...],
) -> tuple[Float[Array, "T D"], tuple[Pages, ...]]:
    """Hidden states before the final norm, and the pages with this step's K and V in them.

    One Pages and one Attend per layer; layers of a page group share theirs.
    """
    x = params["embed"][tokens]
    if spec.embed_scale != 1:
        x = x * jnp.asarray(spec.embed_scale, x.dtype)  # rounded to x's dtype, as in training
    rotation = Rotation(*tables(spec.rope, spec.head_dim, positions))
    in_window = Rotation(*tables(spec.window_rope, spec.head_dim, positions)) if spec.window_rope else rotation
    written = []
    kinds = spec.windows or (None,) * spec.num_layers
    for weights, layer_pages, attend, window in zip(params["layers"], pages, attends, kinds, strict=True):
        turn = rotation if window is None else in_window
        out, layer_pages = self_attention(
            spec, weights, _norm(spec, weights, "attn_norm", x), turn, attend, layer_pages
        )
        x = x + _norm(spec, weights, "attn_out_norm", out)
        out = gated_mlp(weights, _norm(spec, weights, "mlp_norm", x), spec.activation)
        x = x + _norm(spec, weights, "mlp_out_norm", out)
        written.append(layer_pages)
    return x, tuple(written)


def _norm(spec: ModelSpec, weights: dict, name: str, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """The layer's norm of this name, if its architecture has one there."""
    return norm(spec, x, weights[name]) if name in weights else x


def logits(params: dict, spec: ModelSpec, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Final norm and head, float32."""
    normed = _norm(spec, params, "norm", hidden)
    head = (
        einsum("RD,VD->RV", normed, params["embed"]) if spec.tied_head else einsum("RD,DV->RV", normed, params["head"])
    )
    return softcap(head, spec.final_softcap)
