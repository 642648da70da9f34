"""The gated MLP (Shazeer 2020: SwiGLU, and GeGLU with the tanh approximation)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.models.layers import project
from jaxserve.models.spec import ModelSpec


def gated_mlp(spec: ModelSpec, weights: dict, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Apply the gated MLP; float32."""
    both = project("TD,DCF->TCF", x, weights, "gate_up")
    hidden = activate(spec, both[:, 0], both[:, 1]).astype(x.dtype)
    return project("TF,FD->TD", hidden, weights, "down")


def activate(
    spec: ModelSpec, gate: Float[Array, "*n"], up: Float[Array, "*n"]
) -> Float[Array, "*n"]:
    """Return the product of the activated gate and `up`."""
    if spec.activation == "silu":
        return jax.nn.silu(gate) * up
    if spec.activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    # gpt-oss ("clamped"): a sigmoid steeper than silu's, and values within a limit.
    limit = spec.activation_limit
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
