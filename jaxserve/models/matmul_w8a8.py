"""Products of 8-bit weights with activations that are rounded to 8 bits too (w8a8).

Every token has a scale of its own, found as it comes (ZeroQuant, Yao et al. 2022).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxserve.models.matmul import contract
from jaxserve.models.quant import Quantized, QuantScheme
from jaxserve.sharding.mesh import device_kind
from jaxserve.sharding.native_products import multiplies_natively

Product = Callable[[str, jax.Array, jax.Array], jax.Array]  # as matmul.contract


def w8a8_matmul(
    subscripts: str, x: Float[Array, "T D"], weight: Quantized, product: Product = contract
) -> jax.Array:
    """Contract D of 8-bit activations and weights; float32, T and the weight's other letters.

    A token's scale covers all of D however D is split, so that a token is rounded alike on every
    mesh. int8 products are summed in int32, which is exact, fp8 products in float32; then the
    token's and the channel's scales multiply the sum. A token that is not finite gives results
    that are not finite.

    Args:
        product: Function that multiplies the numbers.
    """
    scheme = weight.scheme
    letters = subscripts.split(",")[1].split("->")[0]
    at = letters.index(subscripts[1])
    wide = x.astype(jnp.float32)
    # Multiplication by the reciprocal is written out: XLA turns some divisions by constants into
    # it and others not, and would round differently from one program to the next.
    scales = jnp.abs(wide).max(axis=1, keepdims=True) * (1 / scheme.largest)
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1, scales)
    numbers = wide * (1 / scales)
    if jnp.issubdtype(scheme.dtype, jnp.integer):
        numbers = jnp.rint(numbers)
    found = product(subscripts, numbers.astype(scheme.dtype), weight.values)
    channels = weight.scales.squeeze(at)[None]
    token_scales = scales.reshape(-1, *(1,) * (channels.ndim - 1))
    return found.astype(jnp.float32) * (token_scales * channels)


def check_chip(scheme: QuantScheme | None, mesh: Mesh) -> None:
    """Raise ModelError where the mesh's chips cannot multiply the scheme's numbers natively.

    Only w8a8 schemes need that: others widen the numbers first.
    """
    if scheme and scheme.activations and not multiplies_natively(mesh, scheme.dtype):
        problem = (
            f"{device_kind(mesh)} does not multiply {scheme.numbers} numbers with each other "
            f"(choose {scheme.weights_alone}, which rounds weights alone)"
        )
        raise scheme.flag_error(problem)
