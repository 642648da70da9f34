"""Self-attention over pages: projections, norms and rotation around the attention kernel."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from jaxserve.models.layers import einsum, flatten, project, rms_norm
from jaxserve.models.rope import rotate
from jaxserve.models.sharded_attention import Attend, Rotation
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.paged_attention.api import Pages

QK_NORMS = {
    "none": {},
    "head": {"q_norm": "H", "k_norm": "H"},
    "whole": {"q_norm": "NH", "k_norm": "KH"},
}


def axes(spec: ModelSpec) -> dict[str, str]:
    """Return parameter name -> axes of an attention layer."""
    found = {"qkv": "DKQH", "o": "NHD"} | QK_NORMS[spec.qk_norm]
    if spec.qkv_bias:
        found |= {"qkv_bias": "KQH"}
    if spec.out_bias:
        found |= {"o_bias": "D"}
    if spec.attn_gate:
        found |= {"attn_gate": "DNH"}
    if spec.sinks:
        found |= {"sinks": "N"}
    return found


def self_attention(
    spec: ModelSpec,
    weights: dict,
    x: Float[Array, "T D"],
    rotation: Rotation | None,
    attend: Attend,
    pages: Pages,
) -> tuple[Float[Array, "T D"], Pages]:
    """Return the layer's attention for its tokens, and the pages with their K and V.

    Args:
        rotation: None for a layer without a rope.
    """
    # Q holds a kv head's queries, its key and its value.
    heads = project("TD,DKQH->TKQH", x, weights, "qkv").astype(x.dtype)
    # Without a fixed layout XLA:TPU may transpose the product to suit the rotation, and copies the
    # weight to do so.
    heads = with_layout_constraint(heads, Layout((0, 1, 2, 3)))
    q = heads[:, :, :-2].reshape(len(x), -1, spec.head_dim)
    k = heads[:, :, -2]
    v = heads[:, :, -1]
    if not spec.qk_norm_after_rope:
        q, k = _qk_norms(spec, weights, q, k)
    if rotation:
        q, k = _rotated(rotation, q, k)
    if spec.qk_norm_after_rope:
        q, k = _qk_norms(spec, weights, q, k)
    out, pages = attend(q, k, v, pages, weights.get("sinks"))
    if spec.attn_gate:
        out = _gated(weights, x, out)
    # Heads are flattened: when N and H are contracted as two dimensions, XLA copies the weight in
    # another order in every step.
    flat = weights | {"o": flatten(weights["o"])}
    return project("TM,MD->TD", out.reshape(len(out), -1), flat, "o").astype(x.dtype), pages


def _gated(
    weights: dict, x: Float[Array, "T D"], out: Float[Array, "T N H"]
) -> Float[Array, "T N H"]:
    """Multiply what attention returns by the sigmoid of the gates that the layer's input gives."""
    gates = einsum("TD,DNH->TNH", x, weights["attn_gate"]).astype(x.dtype).astype(jnp.float32)
    return (out.astype(jnp.float32) * jax.nn.sigmoid(gates)).astype(x.dtype)


def _qk_norms(
    spec: ModelSpec, weights: dict, q: Float[Array, "T N H"], k: Float[Array, "T K H"]
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"]]:
    """Apply the norms of queries and keys, if the architecture has them."""
    if spec.qk_norm == "none":
        return q, k
    return norm(spec, q, weights["q_norm"]), norm(spec, k, weights["k_norm"])


def _rotated(
    rotation: Rotation, q: Float[Array, "T N H"], k: Float[Array, "T K H"]
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"]]:
    """Rotate queries and keys, and let queries grow with their position."""
    q = rotate(q, rotation.cos, rotation.sin)
    if rotation.growth is not None:
        q *= rotation.growth[:, None, None].astype(q.dtype)  # rounded as in transformers
    return q, rotate(k, rotation.cos, rotation.sin)


def norm(
    spec: ModelSpec, x: Float[Array, "T *N"], weight: Float[Array, "*N"]
) -> Float[Array, "T *N"]:
    """Apply the RMS norm in the architecture's variant."""
    return rms_norm(x, weight, spec.norm_eps, spec.norm_plus_one, spec.norm_rounds_last)
