"""The gated MLP (Shazeer 2020: SwiGLU, and GeGLU with the tanh approximation)."""

from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Array, Float

from jaxserve.models.layers import project

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated_mlp(weights: dict, x: Float[Array, "T D"], activation: str) -> Float[Array, "T D"]:
    both = project("TD,DCF->TCF", x, weights, "gate_up")
    hidden = (ACTIVATIONS[activation](both[:, 0]) * both[:, 1]).astype(x.dtype)
    return project("TF,FD->TD", hidden, weights, "down").astype(x.dtype)
