"""The gated MLP (Shazeer 2020, SwiGLU)."""

import jax
from jaxtyping import Array, Float

from jaxserve.models.layers import einsum


def gated_mlp(weights: dict, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    hidden = (jax.nn.silu(_linear("TD,DF->TF", x, weights, "gate")) * _linear("TD,DF->TF", x, weights, "up")).astype(
        x.dtype
    )
    return _linear("TF,FD->TD", hidden, weights, "down").astype(x.dtype)


def _linear(subscripts: str, x: jax.Array, weights: dict, name: str) -> jax.Array:
    y = einsum(subscripts, x, weights[name])
    return y + weights[f"{name}_bias"].astype(y.dtype)[None] if f"{name}_bias" in weights else y
