"""Building blocks of layers: products with weights, RMS norm and soft cap."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.models.matmul import contract
from jaxserve.models.matmul_w8a8 import w8a8_matmul
from jaxserve.models.matmul_weight_only import weight_only_matmul
from jaxserve.models.quant import Quantized
from jaxserve.models.summed_last import SummedLast, summed_last_matmul

Weight = jax.Array | Quantized | SummedLast


def einsum(subscripts: str, x: jax.Array, weight: Weight) -> jax.Array:
    """Contract activations with a weight, accumulating in float32; the result is float32.

    float32 operands are not rounded, which GPUs and TPUs would do by default. On a CPU bfloat16
    operands with a float32 accumulator are faster than float32 operands from two rows on.

    Args:
        subscripts: Letters of x, which has two dimensions, of the weight as it is declared, and of
            the result.
    """
    if isinstance(weight, SummedLast):
        return summed_last_matmul(x, weight)
    if not isinstance(weight, Quantized):
        return contract(subscripts, x, weight)
    if weight.scheme.activations:
        return w8a8_matmul(subscripts, x, weight)
    return weight_only_matmul(subscripts, x, weight)


def flatten(weight: Weight) -> Weight:
    """Join all dimensions except the last one; those of a SummedLast are joined in its product."""
    if isinstance(weight, SummedLast):
        return weight
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), weight)


def project(subscripts: str, x: jax.Array, weights: dict, name: str) -> jax.Array:
    """Apply the weight of this name, and its bias if there is one; float32."""
    y = einsum(subscripts, x, weights[name])
    bias = weights.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(y.dtype)[None]


def rms_norm(
    x: Float[Array, "T *N"],
    weight: Float[Array, "*N"],
    eps: float,
    plus_one: bool = False,
    rounds_last: bool = False,
) -> Float[Array, "T *N"]:
    """Apply the RMS norm (Zhang and Sennrich 2019) over the dimensions of the weight, the last.

    The norm is computed in float32 and the result has x's dtype. It is rounded before the product
    with the weight; after it with rounds_last, or with plus_one, which multiplies by 1 + weight.
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(
        jnp.mean(wide * wide, axis=tuple(range(-weight.ndim, 0)), keepdims=True) + eps
    )
    weight = weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)
    if plus_one or rounds_last:
        return (normed * (float(plus_one) + weight.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def softcap(x: Float[Array, "*n"], cap: float | None) -> Float[Array, "*n"]:
    """Return cap * tanh(x / cap), which stays within cap (Gemma 2); None returns x."""
    return x if cap is None else cap * jnp.tanh(x / cap)
