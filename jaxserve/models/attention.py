"""Self-attention over pages: projections, norms, rotation."""

from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from jaxserve.models.layers import flatten, project, rms_norm
from jaxserve.models.rope import rotate
from jaxserve.models.sharded_attention import Attend, Rotation
from jaxserve.models.spec import ModelSpec
from pallas_kernels.paged_attention.api import Pages

QK_NORMS = {
    "none": {},
    "head": {"q_norm": "H", "k_norm": "H"},
    "whole": {"q_norm": "NH", "k_norm": "KH"},
}


def axes(spec: ModelSpec) -> dict[str, str]:
    """Name -> axes of the parameters."""
    found = {"qkv": "DKQH", "o": "NHD"} | QK_NORMS[spec.qk_norm]
    if spec.qkv_bias:
        found |= {"qkv_bias": "KQH"}
    if spec.out_bias:
        found |= {"o_bias": "D"}
    if spec.sinks:
        found |= {"sinks": "N"}
    return found


def self_attention(
    spec: ModelSpec,
    weights: dict,
    x: Float[Array, "T D"],
    rotation: Rotation,
    attend: Attend,
    pages: Pages,
) -> tuple[Float[Array, "T D"], Pages]:
    heads = project("TD,DKQH->TKQH", x, weights, "qkv").astype(
        x.dtype
    )  # of a kv head: its queries, its key, its value
    # Left free, XLA:TPU may turn the product over to suit the rotation, and copies the weight for
    # it.
    heads = with_layout_constraint(heads, Layout((0, 1, 2, 3)))
    q, k, v = heads[:, :, :-2].reshape(len(x), -1, spec.head_dim), heads[:, :, -2], heads[:, :, -1]
    if spec.qk_norm != "none":
        q, k = norm(spec, q, weights["q_norm"]), norm(spec, k, weights["k_norm"])
    q, k = rotate(q, rotation.cos, rotation.sin), rotate(k, rotation.cos, rotation.sin)
    out, pages = attend(q, k, v, pages, weights.get("sinks"))
    # Heads flattened: contracting N and H as two dimensions makes XLA copy the weight in another
    # order, every step.
    flat = weights | {"o": flatten(weights["o"])}
    return project("TM,MD->TD", out.reshape(len(out), -1), flat, "o").astype(x.dtype), pages


def norm(
    spec: ModelSpec, x: Float[Array, "T *N"], weight: Float[Array, "*N"]
) -> Float[Array, "T *N"]:
    """The architecture's kind of RMS norm."""
    return rms_norm(x, weight, spec.norm_eps, spec.norm_plus_one, spec.norm_rounds_last)
