"""Products of activations in full precision and quantized weights; called by layers.einsum."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.models.matmul import contract
from jaxserve.models.quant import KernelBinding, Quantized
from jaxserve.pallas_kernels.quantized_matmul import reference
from jaxserve.pallas_kernels.quantized_matmul.api import Options
from jaxserve.sharding.mesh import device_kind
from jaxserve.sharding.rules import DP_AXES, partition


def weight_only_matmul(subscripts: str, x: Float[Array, "T D"], weight: Quantized) -> jax.Array:
    """Contract activations with a quantized weight; float32, T and the weight's other letters.

    With one scale per output channel, XLA converts the numbers to x's dtype as it reads them
    (every number of 8 or 4 bits has an exact one there) and the scale multiplies the result.
    Weights in groups go to the quantized matrix product: the bound kernel, or its reference.
    """
    letters, out = subscripts.split(",")[1].split("->")
    at = next(i for i, letter in enumerate(letters) if letter not in out)
    if weight.scheme.group is None:
        product = contract(subscripts, x, weight.values.astype(x.dtype))
        return product * weight.scales.squeeze(at)[None]
    numbers = jnp.moveaxis(weight.values, at, 0)
    scales = jnp.moveaxis(weight.scales, at, 0)
    if weight.kernel is None:
        return reference.multiply(x, numbers, scales, Options())
    return _on_shards(x, numbers, scales, at, weight.kernel)


def bind_kernels(params: dict, bindings: Mapping[str, KernelBinding]) -> dict:
    """Return parameters, inside a step, whose weights of these names know their kernels.

    Experts are not bound: the grouped matrix product has kernels of its own.
    """

    def bind(weights: dict) -> dict:
        bound = {
            name: replace(weights[name], kernel=binding)
            for name, binding in bindings.items()
            if name in weights
        }
        return weights | bound

    return bind(params) | {"layers": [bind(layer) for layer in params["layers"]]}


def _on_shards(
    x: jax.Array, numbers: jax.Array, scales: jax.Array, at: int, binding: KernelBinding
) -> jax.Array:
    """Multiply every shard by the kernel, and sum up shards of the contracted dimension.

    Args:
        numbers: Numbers [K, *N] of a weight that had its contracted dimension K at `at`.
        scales: Scales [G, *N] of that weight.
    """
    mesh = binding.mesh
    letters = binding.axes
    if numbers.ndim != len(letters):  # layers.flatten has joined all dimensions but the last
        letters = letters[0] + letters[-1]
    split = partition(letters[at] + letters[:at] + letters[at + 1 :], numbers.shape, mesh)
    summed, *columns = split

    def multiply(x: jax.Array, numbers: jax.Array, scales: jax.Array) -> jax.Array:
        found = binding.kernel.multiply(x, numbers, scales, Options(device_kind(mesh)))
        return lax.psum(found, summed) if summed else found

    return jax.shard_map(
        multiply,
        mesh=mesh,
        in_specs=(PartitionSpec(DP_AXES, summed), split, split),
        out_specs=PartitionSpec(DP_AXES, *columns),
        check_vma=False,
    )(x, numbers, scales)
