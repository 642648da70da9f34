"""The one decoder: its parameters, and the way from token ids to hidden states to logits.

Layers are unrolled, one leaf per weight and layer: a scan over stacked weights copies every layer's weights each step.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.models.attention import Attend, Rotation, self_attention
from jaxserve.models.layers import einsum, rms_norm
from jaxserve.models.mlp import gated_mlp
from jaxserve.models.rope import tables
from jaxserve.models.spec import ModelSpec
from pallas_kernels.paged_attention.reference import Pages
from sharding.params import ParamSpec

LAYER_AXES = {
    "attn_norm": "D",
    "q": "DNH",
    "k": "DKH",
    "v": "DKH",
    "o": "NHD",
    "mlp_norm": "D",
    "gate": "DF",
    "up": "DF",
    "down": "FD",
}


def param_specs(spec: ModelSpec, dtype: jnp.dtype) -> dict:
    """{"embed", "layers": [one dict per layer], "norm", "head" unless tied}, a ParamSpec each."""
    layer = dict(LAYER_AXES)
    if spec.qkv_bias:
        layer |= {"q_bias": "NH", "k_bias": "KH", "v_bias": "KH"}
    if spec.out_bias:
        layer |= {"o_bias": "D"}
    if spec.qk_norm:
        layer |= {"q_norm": "H", "k_norm": "H"}
    if spec.mlp_bias:
        layer |= {"gate_bias": "F", "up_bias": "F", "down_bias": "D"}
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
    return ParamSpec(axes, shape, dtype, mean=1.0 if name.endswith("norm") else 0.0)


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
    rotation = Rotation(*tables(spec.rope, spec.head_dim, positions))
    written = []
    for weights, layer_pages, attend in zip(params["layers"], pages, attends, strict=True):
        normed = rms_norm(x, weights["attn_norm"], spec.norm_eps)
        out, layer_pages = self_attention(spec, weights, normed, rotation, attend, layer_pages)
        x = x + out
        x = x + gated_mlp(weights, rms_norm(x, weights["mlp_norm"], spec.norm_eps))
        written.append(layer_pages)
    return x, tuple(written)


def logits(params: dict, spec: ModelSpec, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Final norm and head, float32."""
    normed = rms_norm(hidden, params["norm"], spec.norm_eps)
    if spec.tied_head:
        return einsum("RD,VD->RV", normed, params["embed"])
    return einsum("RD,DV->RV", normed, params["head"])
