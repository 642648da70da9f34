"""The quantized matrix product in plain XLA: the reference for every kernel; it runs on CPUs.

Each group has a product of its own: a TPU multiplies, scales and adds them up as they come. A CPU
or a GPU writes all of them to memory, so with enough rows that they outweigh the weight in x's
dtype, it multiplies with the dequantized weight instead.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int4

from jaxserve.pallas_kernels.quantized_matmul.api import Demand, Options


def check(options: Options, demand: Demand) -> None:
    """Accept any size."""


@jax.enable_x64(False)
def multiply(
    x: Float[Array, "T K"],
    numbers: Int4[Array, "K *N"],
    scales: Float[Array, "G *N"],
    options: Options,
) -> Float[Array, "T *N"]:
    """Return rows times the weight, in float32; see `api.QuantizedMatmul.multiply`."""
    groups = len(scales)
    # At the default precision GPUs and TPUs round float32 operands.
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def by_group(x: jax.Array, numbers: jax.Array, scales: jax.Array) -> jax.Array:
        """Return the sum of the groups' products, each scaled on its own."""
        apart = x.reshape(len(x), groups, -1)
        by_scale = _grouped(numbers, groups).astype(x.dtype)
        products = jnp.einsum(
            "Tgk,gk...->gT...", apart, by_scale, precision=exact, preferred_element_type=jnp.float32
        )
        return (products * scales[:, None]).sum(0)

    def dequantized(x: jax.Array, numbers: jax.Array, scales: jax.Array) -> jax.Array:
        """Return the product with the weight in x's dtype."""
        scaled = _grouped(numbers, groups).astype(jnp.float32) * scales[:, None]
        weight = scaled.astype(x.dtype).reshape(numbers.shape)
        return jnp.einsum(
            "TK,K...->T...", x, weight, precision=exact, preferred_element_type=jnp.float32
        )

    # Rows from which all groups' products would be more memory than the weight in x's dtype.
    elsewhere = by_group if 2 * len(x) <= len(numbers) // groups else dequantized
    return lax.platform_dependent(x, numbers, scales, tpu=by_group, default=elsewhere)


def _grouped(numbers: Int4[Array, "K *N"], groups: int) -> Int4[Array, "G g *N"]:
    """Return numbers with their first dimension cut into groups."""
    return numbers.reshape(groups, -1, *numbers.shape[1:])
