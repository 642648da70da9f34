"""The gated MLP (Shazeer 2020: SwiGLU, and GeGLU with the tanh approximation)."""

from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Array, Float

from jaxserve.models.layers import einsum

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated_mlp(weights: dict, x: Float[Array, "T D"], activation: str) -> Float[Array, "T D"]:
    both = _linear("TD,DCF->TCF", x, weights, "gate_up")
    hidden = (ACTIVATIONS[activation](both[:, 0]) * both[:, 1]).astype(x.dtype)
    return _linear("TF,FD->TD", hidden, weights, "down").astype(x.dtype)


def _linear(subscripts: str, x: jax.Array, weights: dict, name: str) -> jax.Array:
    y = einsum(subscripts, x, weights[name])
    return y + weights[f"{name}_bias"].astype(y.dtype)[None] if f"{name}_bias" in weights else y
