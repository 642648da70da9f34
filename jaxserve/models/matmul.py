"""The product of activations with a weight, by XLA."""

import jax
import jax.numpy as jnp
from jax import lax


def contract(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Contract operands of one dtype, and sum in int32 those of int8, the others in float32.

    Operands are not rounded: on GPUs and TPUs float32 would be by default, and cuBLAS would sum
    fp8 products in fewer bits.
    """
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    is_exact_anyway = is_integer or x.dtype == jnp.bfloat16
    return jnp.einsum(
        subscripts,
        x,
        weight,
        precision=None if is_exact_anyway else lax.Precision.HIGHEST,
        preferred_element_type=jnp.int32 if is_integer else jnp.float32,
    )
