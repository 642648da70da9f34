"""The grouped matrix product in plain XLA: the reference of every kernel, and what runs on a CPU.

A loop over the blocks that hold rows, each of which takes its expert's weight out of all of them: one expert's is all
the memory that this needs. XLA expands `lax.ragged_dot`, for CPUs and GPUs, into products of every row with every
expert.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.api import Demand, Groups, Options, check_rows, next_power_of_two

MOST_ROWS = 256  # of a block, each of which takes out a weight


def check(options: Options, demand: Demand) -> None:
    """Any size will do."""
    check_rows(options, demand)


def block_rows(dtype: jnp.dtype, rows_per_expert: int) -> int:
    """No more than there are rows: here padding costs as much as rows do."""
    return min(next_power_of_two(rows_per_expert), MOST_ROWS)


def multiply(
    x: Float[Array, "M K"], weight: Float[Array, "E C K N"], groups: Groups, options: Options
) -> Float[Array, "M C N"]:
    parts, columns = weight.shape[1], weight.shape[3]
    flat = weight.reshape(-1, *weight.shape[2:])  # [E * C, K, N]
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # without asking, GPUs and TPUs round it

    def multiply_block(nth: jax.Array, done: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(x, nth * options.block, options.block)
        first = groups.experts[nth] * parts
        weights = [lax.dynamic_index_in_dim(flat, first + part, keepdims=False) for part in range(parts)]
        products = [jnp.dot(rows, w, precision=exact, preferred_element_type=jnp.float32) for w in weights]
        found = jnp.stack(products, axis=1).astype(options.out_dtype)
        return lax.dynamic_update_slice_in_dim(done, found, nth * options.block, 0)

    nothing = jnp.zeros((len(x), parts, columns), options.out_dtype)
    return lax.fori_loop(0, groups.live, multiply_block, nothing)
