"""The grouped matrix product in plain XLA: the reference for every kernel; it runs on CPUs.

A loop over the blocks that hold rows takes each block's expert out of the weights, and dequantizes
that expert's weight if it has scales, so one expert's weight is all the memory it needs. XLA
expands `lax.ragged_dot`, for CPUs and GPUs, into products of every row with every expert.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Num

from jaxserve.pallas_kernels.grouped_matmul.api import (
    Demand,
    Groups,
    Options,
    check_rows,
    next_power_of_two,
)

MOST_ROWS = 256  # rows of a block; every block copies a weight out of all of them


def check(options: Options, demand: Demand) -> None:
    """Accept any size; raise KernelError for what no implementation takes."""
    check_rows(options, demand)


def block_rows(dtype: jnp.dtype, rows_per_expert: int) -> int:
    """Return no more rows than there are: on a CPU padding costs as much as rows do."""
    return min(next_power_of_two(rows_per_expert), MOST_ROWS)


@jax.enable_x64(False)
def multiply(
    x: Float[Array, "M K"],
    weight: Num[Array, "E C K N"],
    groups: Groups,
    options: Options,
    scales: Float[Array, "E C g N"] | None = None,
) -> Float[Array, "M C N"]:
    """Return each row times its expert's weight; see `api.GroupedMatmul.multiply`."""
    parts = weight.shape[1]
    columns = weight.shape[3]
    # At the default precision GPUs and TPUs round float32 operands.
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def one_of(array: jax.Array, nth: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(array.reshape(-1, *array.shape[2:]), nth, keepdims=False)

    def multiply_part(rows: jax.Array, nth: jax.Array) -> jax.Array:
        numbers = one_of(weight, nth)
        if scales is not None:
            # Without the constraint XLA:GPU first transposes the weights of all experts for a
            # product of 4-bit numbers.
            numbers = with_layout_constraint(numbers, Layout((0, 1)))
            numbers = dequantized(numbers, one_of(scales, nth)) if scales.shape[2] > 1 else numbers
        product = jnp.dot(
            rows, numbers.astype(x.dtype), precision=exact, preferred_element_type=jnp.float32
        )
        if scales is not None and scales.shape[2] == 1:
            return product * one_of(scales, nth)
        return product

    def multiply_block(nth: jax.Array, done: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(x, nth * options.block, options.block)
        first = groups.experts[nth] * parts
        products = [multiply_part(rows, first + part) for part in range(parts)]
        found = jnp.stack(products, axis=1).astype(options.out_dtype)
        return lax.dynamic_update_slice_in_dim(done, found, nth * options.block, 0)

    nothing = jnp.zeros((len(x), parts, columns), options.out_dtype)
    return lax.fori_loop(0, groups.live, multiply_block, nothing)


def dequantized(numbers: Num[Array, "K N"], scales: Float[Array, "g N"]) -> Float[Array, "K N"]:
    """Return the weight in float32; each row of scales is that of K / g numbers."""
    apart = numbers.astype(jnp.float32).reshape(len(scales), -1, numbers.shape[1])
    return (apart * scales[:, None]).reshape(numbers.shape)
