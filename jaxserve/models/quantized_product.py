"""Products of activations and quantized weights; layers.einsum is what asks for them."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.models.quant import Quantized, grouped


def quantized_product(subscripts: str, x: Float[Array, "T D"], weight: Quantized) -> jax.Array:
    """float32; T and the weight's other letters in their order. Of 8 or 4 bits every number is one of x's dtype.

    A scale per output channel multiplies the result, and XLA converts the numbers as it reads them. With groups, each
    has a product of its own: a TPU multiplies and adds them up as they come. A GPU writes all of them to memory, so
    from as many rows on as make that more than the weight in x's dtype, it is given that instead.
    """
    letters, out = subscripts.split(",")[1].split("->")
    at = next(i for i, letter in enumerate(letters) if letter not in out)
    if weight.form.group is None:
        return float_product(subscripts, x, weight.values.astype(x.dtype)) * weight.scales.squeeze(at)[None]
    groups, letter = weight.scales.shape[at], letters[at]

    def by_group(x: jax.Array, numbers: jax.Array, scales: jax.Array) -> jax.Array:
        apart = f"{out[0]}g{letter},{letters.replace(letter, 'g' + letter)}->g{out}"
        products = float_product(apart, x.reshape(len(x), groups, -1), numbers.astype(x.dtype))
        return (products * jnp.moveaxis(scales, at, 0)[:, None]).sum(0)

    def dequantized(x: jax.Array, numbers: jax.Array, scales: jax.Array) -> jax.Array:
        scaled = numbers.astype(jnp.float32) * jnp.expand_dims(scales, at + 1)
        return float_product(subscripts, x, scaled.astype(x.dtype).reshape(weight.values.shape))

    elsewhere = by_group if 2 * len(x) <= weight.form.group else dequantized
    numbers = grouped(weight.values, slice(at, at + 1), groups)
    return lax.platform_dependent(x, numbers, weight.scales, tpu=by_group, default=elsewhere)


def float_product(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Accumulated in float32, which is what it returns; float32 operands are not rounded."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x, weight, precision=exact, preferred_element_type=jnp.float32)
