"""The pieces of a layer that hold no state."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def einsum(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Contract activations with a weight, accumulating in float32; the result is float32.

    On a CPU bfloat16 operands with a float32 accumulator are faster than float32 operands from two rows on.
    """
    return jnp.einsum(subscripts, x, weight, preferred_element_type=jnp.float32)


def rms_norm(x: Float[Array, "*T D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*T D"]:
    """Zhang and Sennrich 2019, in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + weight.shape)
