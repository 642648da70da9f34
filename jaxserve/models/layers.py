"""The pieces of a layer that hold no state."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.models.matmul_w8a8 import w8a8_matmul
from jaxserve.models.matmul_weight_only import float_matmul, weight_only_matmul
from jaxserve.models.quant import Quantized


def einsum(subscripts: str, x: jax.Array, weight: jax.Array | Quantized) -> jax.Array:
    """Contract activations with a weight, accumulating in float32; the result is float32.

    float32 operands stay what they are: without asking, GPUs and TPUs round them. On a CPU bfloat16
    operands with a float32 accumulator are faster than float32 operands from two rows on.
    """
    if isinstance(weight, Quantized):
        product = w8a8_matmul if weight.scheme.activations else weight_only_matmul
        return product(subscripts, x, weight)
    return float_matmul(subscripts, x, weight)


def flatten(weight: jax.Array | Quantized) -> jax.Array | Quantized:
    """All dimensions but the last one as one."""
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), weight)


def project(subscripts: str, x: jax.Array, weights: dict, name: str) -> jax.Array:
    """The projection of that name and its bias, if it has one; float32."""
    y = einsum(subscripts, x, weights[name])
    return y + weights[f"{name}_bias"].astype(y.dtype)[None] if f"{name}_bias" in weights else y


def rms_norm(
    x: Float[Array, "T *N"],
    weight: Float[Array, "*N"],
    eps: float,
    plus_one: bool = False,
    rounds_last: bool = False,
) -> Float[Array, "T *N"]:
    """Zhang and Sennrich 2019, in float32, over the last dimensions: as many as the weight has. The
    dtype is x's.

    Rounded before the product with the weight, unless rounds_last; plus_one multiplies by 1 +
    weight and rounds then.
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
    """cap * tanh(x / cap): no value beyond cap (Gemma 2); None leaves x as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)
