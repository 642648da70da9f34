"""The quantized matrix product on TPUs, in Pallas.

The grid goes over tiles of columns, each with all of K, which Pallas's pipeline fetches while the
tile before is used. A tile's numbers become bfloat16 in vector registers, on their way to the
matrix unit. With few rows and groups of 128, each group's product is scaled, which is exact.
Otherwise the numbers are scaled, in float32: a product of a group of 32 would leave three quarters
of the matrix unit idle. Where there are more rows than meet a tile at once, the tile is converted
once and kept in vector memory for all of them.

Weights have to lie in memory with K next to the last dimension
(`jaxserve.sharding.params.memory_order`). Dimensions before the last one are parts, whose columns
lie side by side in the result.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int4

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.grouped_matmul.tpu_plan import TILE_LANES
from jaxserve.pallas_kernels.quantized_matmul.api import GROUPS, Demand, Options
from jaxserve.pallas_kernels.quantized_matmul.tpu_plan import FEW, HEIGHTS, Plan, plan_of

NARROW = (32, 64)  # columns of parts so narrow that several fill a register
# Size of the groups whose products are scaled and not their numbers: as many numbers as older
# matrix units sum up at once.
EXACT_GROUP = 128


def check(options: Options, demand: Demand) -> None:
    """Raise KernelError for dtypes and sizes that the kernel cannot take."""
    instead = "--quantized-matmul reference"
    if demand.dtype != jnp.bfloat16:
        raise KernelError(
            f"activations of {demand.dtype}: the TPU kernel multiplies bfloat16 (--dtype "
            f"bfloat16, or {instead})"
        )
    if demand.group not in GROUPS:
        raise KernelError(
            f"groups of {demand.group} numbers: the TPU kernel supports {GROUPS} ({instead})"
        )
    if demand.transposed:
        raise KernelError(
            f"a weight whose last dimension is summed over: the TPU kernel takes none ({instead})"
        )
    *parts, columns = demand.columns
    narrow = columns in NARROW and math.prod(parts) % (TILE_LANES // columns) == 0
    if math.prod(parts) > 1 and columns % TILE_LANES and not narrow:
        raise KernelError(
            f"a weight in {math.prod(parts)} parts of {columns} columns: on a TPU they are "
            f"multiples of {TILE_LANES}, or of {NARROW} columns so many that they fill as much "
            f"({instead})"
        )
    # Raises KernelError when no tile fits. Few rows, one block of many rows, and several blocks
    # have plans of their own: a tile that meets several needs room for its converted copy.
    for rows in (FEW, FEW + 1, max(HEIGHTS) + 1):
        plan_of(
            rows, demand.contracted, math.prod(parts), columns, demand.group, options.device_kind
        )


@jax.enable_x64(False)
def multiply(
    x: Float[Array, "T K"],
    numbers: Int4[Array, "K *N"],
    scales: Float[Array, "G *N"],
    options: Options,
) -> Float[Array, "T *N"]:
    """Return rows times the weight, in float32; see `api.QuantizedMatmul.multiply`."""
    rows, contracted = x.shape
    *parts, columns = numbers.shape[1:]
    count = math.prod(parts)
    group = contracted // len(scales)
    plan = plan_of(rows, contracted, count, columns, group, options.device_kind)

    def in_parts(weight: jax.Array) -> jax.Array:
        """Return a weight, or its scales, as [parts, length, columns]."""
        # The order in which the weight lies in memory: nothing is moved.
        return jnp.moveaxis(weight, 0, -2).reshape(count, len(weight), columns)

    tiles = -(-columns // plan.columns)  # of a part

    def tile(length: int) -> pl.BlockSpec:
        """Return the blocks of an array [parts, length, columns]."""
        return pl.BlockSpec(
            (plan.parts, length, plan.columns), lambda part, column, row: (part, 0, column)
        )

    converted = pltpu.VMEM((plan.parts, contracted, plan.columns), jnp.bfloat16)
    product = pl.pallas_call(
        partial(_multiply_kept if plan.keeps_converted else _multiply_few, plan, group),
        out_shape=jax.ShapeDtypeStruct((rows, count * columns), jnp.float32),
        grid=(count // plan.parts, tiles, -(-rows // plan.rows)),
        in_specs=[
            pl.BlockSpec((plan.rows, contracted), lambda part, column, row: (row, 0)),
            tile(contracted),
            tile(len(scales)),
        ],
        out_specs=pl.BlockSpec(
            (plan.rows, plan.parts * plan.columns),
            lambda part, column, row: (row, part * tiles + column),
        ),
        scratch_shapes=[converted] if plan.keeps_converted else [],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=plan.limit
        ),
        name="quantized_matmul",
    )(x, in_parts(numbers), in_parts(scales))
    return product.reshape(rows, *parts, columns)


def _multiply_few(plan: Plan, group: int, x: Any, numbers: Any, scales: Any, out: Any) -> None:
    """Multiply few rows with a tile whose numbers are converted on the way.

    x [rows, K], numbers [parts, K, columns], scales [parts, G, columns], out [rows, parts *
    columns].
    """

    def add(part: int, nth: jax.Array | int, sums: jax.Array) -> jax.Array:
        """Return the sums with the product of a part's nth chunk of K added."""
        begin = nth * plan.chunk
        some = x[:, _at(begin, plan.chunk)]
        if group != EXACT_GROUP:
            return sums + _dot(
                some, _converted(plan, group, numbers.at[part], scales.at[part], nth)
            )
        exact = numbers[part, _at(begin, plan.chunk)].astype(jnp.bfloat16)
        for first in range(0, plan.chunk, group):
            scale = scales[part, pl.ds((begin + first) // group, 1)]
            sums += _dot(some[:, first : first + group], exact[first : first + group]) * scale
        return sums

    for part in range(plan.parts):
        nothing = jnp.zeros((plan.rows, plan.columns), jnp.float32)
        chunks = x.shape[1] // plan.chunk
        sums = (
            add(part, 0, nothing)
            if chunks == 1
            else lax.fori_loop(0, chunks, partial(add, part), nothing)
        )
        out[:, part * plan.columns : (part + 1) * plan.columns] = sums


def _multiply_kept(
    plan: Plan, group: int, x: Any, numbers: Any, scales: Any, out: Any, converted: Any
) -> None:
    """Multiply a block of rows with a tile that is converted once and kept.

    converted [parts, K, columns] bfloat16 is filled when the tile's first rows come.
    """

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for part in range(plan.parts):

            def convert(nth: jax.Array, _: None, part: int = part) -> None:
                found = _converted(plan, group, numbers.at[part], scales.at[part], nth)
                converted[part, _at(nth * plan.chunk, plan.chunk)] = found

            lax.fori_loop(0, x.shape[1] // plan.chunk, convert, None)

    for part in range(plan.parts):
        out[:, part * plan.columns : (part + 1) * plan.columns] = _dot(x[...], converted[part])


def _converted(
    plan: Plan, group: int, numbers: Any, scales: Any, nth: jax.Array | int
) -> jax.Array:
    """Return a part's nth chunk of K in bfloat16, scaled in float32."""
    wide = numbers[_at(nth * plan.chunk, plan.chunk)].astype(jnp.float32)
    groups = plan.chunk // group
    scaled = [
        wide[at * group : (at + 1) * group] * scales[pl.ds(nth * groups + at, 1)]
        for at in range(groups)
    ]
    return jnp.concatenate(scaled).astype(jnp.bfloat16)


def _at(begin: jax.Array | int, size: int) -> Any:
    """Return a slice; a begin known to the device alone is a multiple of the size."""
    return pl.ds(begin if isinstance(begin, int) else pl.multiple_of(begin, size), size)


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the product in float32."""
    return jnp.dot(x, weight, preferred_element_type=jnp.float32)
