"""The one decoder: its parameters, and the way from token ids to hidden states to logits.

Layers are unrolled, one leaf per weight and layer: a scan over stacked weights copies every layer's
weights each step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.models import attention, latent, moe
from jaxserve.models.attention import norm, self_attention
from jaxserve.models.latent import latent_attention
from jaxserve.models.layers import einsum, softcap
from jaxserve.models.mlp import gated_mlp
from jaxserve.models.moe import Experts
from jaxserve.models.quant import QuantScheme, quantized_specs
from jaxserve.models.rope import tables
from jaxserve.models.sharded_attention import Attend, Rotation
from jaxserve.models.spec import ModelSpec
from pallas_kernels.paged_attention.api import Pages
from sharding.params import ParamSpec

NORMS = {
    "before": ("attn_norm", "mlp_norm"),
    "after": ("attn_out_norm", "mlp_out_norm"),
    "around": ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm"),
}
ALWAYS_FLOAT32 = frozenset({"correction"})  # rounded, it would choose other experts
SHORTEST = 1e-12  # no vector is made longer than this allows: one of zeros stays what it is


class Forwarded(NamedTuple):
    hidden: Float[Array, "T D"]  # before the final norm
    pages: tuple[Pages, ...]  # with this step's K and V in them
    load: (
        Int[Array, "A M E"] | None
    )  # tokens that each expert answered, in every layer that has some


def layer_axes(spec: ModelSpec, layer: int) -> dict:
    """Name -> axes of one layer's parameters; of its experts, a dict of the same kind."""
    axes = latent.axes(spec.latent) if spec.latent else attention.axes(spec)
    axes |= dict.fromkeys(NORMS[spec.norms], "D")
    if spec.has_experts(layer):
        return axes | moe.axes(spec)
    biases = {"gate_up_bias": "CF", "down_bias": "D"} if spec.mlp_bias else {}
    return axes | {"gate_up": "DCF", "down": "FD"} | biases


def param_specs(spec: ModelSpec, dtype: jnp.dtype, form: QuantScheme | None = None) -> dict:
    """{"embed", "layers": [one dict per layer], "norm", "head" if it has one}, a ParamSpec each.

    form: of the weights that are quantized, a Quantized each; ModelError where the model has none
    of that form.
    """
    specs: dict = {
        "embed": _spec(spec, "VD", dtype),
        "layers": [
            _specs(spec, layer_axes(spec, layer), dtype) for layer in range(spec.num_layers)
        ],
        "norm": _spec(spec, "D", dtype, "norm"),
    }
    specs |= {"head": _spec(spec, "DV", dtype)} if spec.has_head else {}
    return quantized_specs(spec, specs, form) if form else specs


def _specs(spec: ModelSpec, axes: dict, dtype: jnp.dtype, block: str = "") -> dict:
    return {
        name: _specs(spec, own, dtype, name)
        if isinstance(own, dict)
        else _spec(spec, own, dtype, name, block)
        for name, own in axes.items()
    }


def _spec(
    spec: ModelSpec, axes: str, dtype: jnp.dtype, name: str = "", block: str = ""
) -> ParamSpec:
    shape = tuple(spec.sizes(block)[letter] for letter in axes)
    mean = 1.0 if name.endswith("norm") and not spec.norm_plus_one else 0.0
    return ParamSpec(axes, shape, jnp.dtype(np.float32) if name in ALWAYS_FLOAT32 else dtype, mean)


def forward(
    params: dict,
    spec: ModelSpec,
    pages: tuple[Pages, ...],
    tokens: Int[Array, "T"],
    positions: Int[Array, "T"],
    attends: tuple[Attend, ...],
    experts: Experts | None = None,
) -> Forwarded:
    """All of a step's tokens once through the layers.

    One Pages and one Attend per layer; layers of a page group share theirs. experts: of a model
    that has some.
    """
    x = params["embed"][tokens]
    if spec.embed_scale != 1:
        x = x * jnp.asarray(spec.embed_scale, x.dtype)  # rounded to x's dtype, as in training
    rotation = Rotation(*tables(spec.rope, spec.rope_dim, positions))
    in_window = (
        Rotation(*tables(spec.window_rope, spec.rope_dim, positions))
        if spec.window_rope
        else rotation
    )
    written, loads = list[Pages](), list[jax.Array]()
    kinds = spec.windows or (None,) * spec.num_layers
    for weights, layer_pages, attend, window in zip(
        params["layers"], pages, attends, kinds, strict=True
    ):
        turn = rotation if window is None else in_window
        normed = _norm(spec, weights, "attn_norm", x)
        if spec.latent:
            out, layer_pages = latent_attention(
                spec.latent, weights, normed, turn, attend, layer_pages
            )
        else:
            out, layer_pages = self_attention(spec, weights, normed, turn, attend, layer_pages)
        x = x + _norm(spec, weights, "attn_out_norm", out)
        normed = _norm(spec, weights, "mlp_norm", x)
        if experts and "experts" in weights:
            out, load = experts(weights, normed)
            loads.append(load)
        else:
            out = gated_mlp(spec, weights, normed).astype(x.dtype)
        x = x + _norm(spec, weights, "mlp_out_norm", out)
        written.append(layer_pages)
    return Forwarded(x, tuple(written), jnp.stack(loads, 1) if loads else None)


def _norm(spec: ModelSpec, weights: dict, name: str, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """The layer's norm of this name, if its architecture has one there."""
    return norm(spec, x, weights[name]) if name in weights else x


def logits(params: dict, spec: ModelSpec, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """Final norm and head, float32."""
    normed = _norm(spec, params, "norm", hidden)
    head = (
        einsum("RD,VD->RV", normed, params["embed"])
        if spec.tied_head
        else einsum("RD,DV->RV", normed, params["head"])
    )
    return softcap(head, spec.final_softcap)


def embeddings(params: dict, spec: ModelSpec, hidden: Float[Array, "R D"]) -> Float[Array, "R D"]:
    """Final norm, and each vector divided by its length; float32."""
    normed = _norm(spec, params, "norm", hidden).astype(jnp.float32)
    return normed / jnp.maximum(jnp.linalg.norm(normed, axis=-1, keepdims=True), SHORTEST)
