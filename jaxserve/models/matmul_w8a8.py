"""Products of 8-bit numbers with each other (w8a8): activations are rounded as well, each token by
its own scale.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxserve.errors import ModelError
from jaxserve.models.quant import Form, Quantized
from sharding.chips import multiplies
from sharding.mesh import device_kind


def low_precision_product(subscripts: str, x: Float[Array, "T D"], weight: Quantized) -> jax.Array:
    """float32; T and the weight's other letters in their order.

    Scales are found as the tokens come (ZeroQuant, Yao et al. 2022), over all of D however it is
    split, so that a token is rounded alike on every mesh. Products are added up in int32, which is
    exact, or of fp8 in float32; then a token's scale and a channel's multiply them. What is not
    finite in a token stays so in all of its results.
    """
    form, letters = weight.form, subscripts.split(",")[1].split("->")[0]
    at = letters.index(subscripts[1])
    wide = x.astype(jnp.float32)
    # XLA would make these multiplications out of divisions, or not, and round otherwise.
    scales = jnp.abs(wide).max(axis=1, keepdims=True) * (1 / form.largest)
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1, scales)
    numbers = wide * (1 / scales)
    integers = jnp.issubdtype(form.dtype, jnp.integer)
    rounded = (jnp.rint(numbers) if integers else numbers).astype(form.dtype)
    product = jnp.einsum(
        subscripts,
        rounded,
        weight.values,
        precision=None
        if integers
        else lax.Precision.HIGHEST,  # cuBLAS would add fp8 products up in fewer bits
        preferred_element_type=jnp.int32 if integers else jnp.float32,
    )
    channels = weight.scales.squeeze(at)[None]
    return product.astype(jnp.float32) * (
        scales.reshape(-1, *(1,) * (channels.ndim - 1)) * channels
    )


def check_chip(form: Form | None, mesh: Mesh) -> None:
    """ModelError where the mesh's chips cannot multiply such numbers with each other."""
    if form and form.activations and not multiplies(mesh, form.dtype):
        raise ModelError(
            f"--weights {form}: {device_kind(mesh)} does not multiply {form.numbers} numbers "
            f"with each other "
            f"(choose {form.weights_alone}, which rounds weights alone)"
        )
