"""Products of activations and quantized weights; layers.einsum is what asks for them."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.models.quant import Placed, Quantized
from pallas_kernels.quantized_matmul import reference
from pallas_kernels.quantized_matmul.api import Options
from sharding.mesh import device_kind
from sharding.rules import LANES, partition


def quantized_product(subscripts: str, x: Float[Array, "T D"], weight: Quantized) -> jax.Array:
    """float32; T and the weight's other letters in their order. Of 8 or 4 bits every number is one
    of x's dtype.

    A scale per output channel multiplies the result, and XLA converts the numbers as it reads them.
    Groups are the quantized matrix product's, a kernel's where the weight is placed.
    """
    letters, out = subscripts.split(",")[1].split("->")
    at = next(i for i, letter in enumerate(letters) if letter not in out)
    if weight.form.group is None:
        return (
            float_product(subscripts, x, weight.values.astype(x.dtype))
            * weight.scales.squeeze(at)[None]
        )
    numbers, scales = (jnp.moveaxis(part, at, 0) for part in (weight.values, weight.scales))
    if weight.placed is None:
        return reference.multiply(x, numbers, scales, Options())
    return _on_shards(x, numbers, scales, at, weight.placed)


def float_product(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Accumulated in float32, which is what it returns; float32 operands are not rounded."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x, weight, precision=exact, preferred_element_type=jnp.float32)


# ---- by kernels


def place_weights(params: dict, placed: Mapping[str, Placed]) -> dict:
    """Parameters, inside a step: those of these names know what multiplies them. Experts have their
    own kernels.
    """

    def put(weights: dict) -> dict:
        found = {name: weights[name] for name in placed if name in weights}
        return weights | {
            name: replace(weight, placed=placed[name]) for name, weight in found.items()
        }

    return put(params) | {"layers": [put(layer) for layer in params["layers"]]}


def _on_shards(
    x: jax.Array, numbers: jax.Array, scales: jax.Array, at: int, placed: Placed
) -> jax.Array:
    """numbers [K, *N] and scales [G, *N] of a weight that had K at `at`."""
    mesh, kernel = placed.mesh, placed.kernel
    letters = (
        placed.axes if numbers.ndim == len(placed.axes) else placed.axes[0] + placed.axes[-1]
    )  # flattened
    split = partition(letters[at] + letters[:at] + letters[at + 1 :], numbers.shape, mesh)
    summed, *columns = split

    def multiply(x: jax.Array, numbers: jax.Array, scales: jax.Array) -> jax.Array:
        found = kernel.multiply(x, numbers, scales, Options(device_kind(mesh)))
        return lax.psum(found, summed) if summed else found

    return jax.shard_map(
        multiply,
        mesh=mesh,
        in_specs=(PartitionSpec(LANES, summed), split, split),
        out_specs=PartitionSpec(LANES, *columns),
        check_vma=False,
    )(x, numbers, scales)
