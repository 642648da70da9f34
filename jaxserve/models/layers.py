"""The pieces of a layer that hold no state."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.models.quant import Quantized, grouped


def einsum(subscripts: str, x: jax.Array, weight: jax.Array | Quantized) -> jax.Array:
    """Contract activations with a weight, accumulating in float32; the result is float32.

    float32 operands stay what they are: without asking, GPUs and TPUs round them. On a CPU bfloat16 operands with a
    float32 accumulator are faster than float32 operands from two rows on.
    """
    if isinstance(weight, Quantized):
        return _quantized_product(subscripts, x, weight)
    return _product(subscripts, x, weight)


def _product(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x, weight, precision=exact, preferred_element_type=jnp.float32)


def _quantized_product(subscripts: str, x: Float[Array, "T D"], weight: Quantized) -> jax.Array:
    """The result is T and the weight's other letters in their order. Of 8 or 4 bits every number is one of x's dtype.

    A scale per output channel multiplies the result, and XLA converts the numbers as it reads them. With groups, each
    has a product of its own: a TPU multiplies and adds them up as they come. A GPU writes all of them to memory, so
    from as many rows on as make that more than the weight in x's dtype, it is given that instead.
    """
    letters, out = subscripts.split(",")[1].split("->")
    at = next(i for i, letter in enumerate(letters) if letter not in out)
    if weight.form.group is None:
        return _product(subscripts, x, weight.values.astype(x.dtype)) * weight.scales.squeeze(at)[None]
    groups, letter = weight.scales.shape[at], letters[at]

    def by_group(x: jax.Array, numbers: jax.Array, scales: jax.Array) -> jax.Array:
        apart = f"{out[0]}g{letter},{letters.replace(letter, 'g' + letter)}->g{out}"
        products = _product(apart, x.reshape(len(x), groups, -1), numbers.astype(x.dtype))
        return (products * jnp.moveaxis(scales, at, 0)[:, None]).sum(0)

    def dequantized(x: jax.Array, numbers: jax.Array, scales: jax.Array) -> jax.Array:
        scaled = numbers.astype(jnp.float32) * jnp.expand_dims(scales, at + 1)
        return _product(subscripts, x, scaled.astype(x.dtype).reshape(weight.values.shape))

    elsewhere = by_group if 2 * len(x) <= weight.form.group else dequantized
    numbers = grouped(weight.values, slice(at, at + 1), groups)
    return lax.platform_dependent(x, numbers, weight.scales, tpu=by_group, default=elsewhere)


def flatten(weight: jax.Array | Quantized) -> jax.Array | Quantized:
    """All dimensions but the last one as one."""
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), weight)


def project(subscripts: str, x: jax.Array, weights: dict, name: str) -> jax.Array:
    """The projection of that name and its bias, if it has one; float32."""
    y = einsum(subscripts, x, weights[name])
    return y + weights[f"{name}_bias"].astype(y.dtype)[None] if f"{name}_bias" in weights else y


def rms_norm(
    x: Float[Array, "T *N"], weight: Float[Array, "*N"], eps: float, plus_one: bool = False, rounds_last: bool = False
) -> Float[Array, "T *N"]:
    """Zhang and Sennrich 2019, in float32, over the last dimensions: as many as the weight has. The dtype is x's.

    Rounded before the product with the weight, unless rounds_last; plus_one multiplies by 1 + weight and rounds then.
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=tuple(range(-weight.ndim, 0)), keepdims=True) + eps)
    weight = weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)
    if plus_one or rounds_last:
        return (normed * (float(plus_one) + weight.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def softcap(x: Float[Array, "*n"], cap: float | None) -> Float[Array, "*n"]:
    """cap * tanh(x / cap): no value beyond cap (Gemma 2); None leaves x as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)
