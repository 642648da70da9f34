"""The grouped matrix product on TPUs, in Pallas.

The grid goes over tiles of columns and, within each, over the blocks that hold rows: the blocks of an expert follow
each other, so that its tile, all of K, is fetched once and stays for all of them, and the next expert's is on its way
meanwhile, by Pallas's own pipeline. The number of blocks is the grid's own size, known to the device alone: blocks
without rows are not visited. Where a tile of all of K does not fit into vector memory (`tpu_plan.py`), it comes in
parts, for every block anew. The order is that of jax's megablox.

Weights have to lie in memory row by row. XLA's own choice for an argument whose rows are no multiple of 128 numbers is
another one, and it would copy all weights for every call: such arguments want a layout (`jax.experimental.layout`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_matmul.api import Demand, Groups, Options, check_rows, next_power_of_two
from pallas_kernels.grouped_matmul.tpu_plan import plan_of

DTYPES = (jnp.float32, jnp.bfloat16)
SCALAR_BYTES = 2**19  # of scalar memory for the experts of blocks
LEAST, TALL, TALLEST = 16, 128, 256  # rows of a block
WIDTH = 512  # columns that are multiplied together


def check(options: Options, demand: Demand) -> None:
    check_rows(options, demand)
    if demand.dtype not in DTYPES or options.out_dtype not in DTYPES:
        raise KernelError(
            f"{demand.dtype} multiplied into {options.out_dtype}: the TPU kernel has float32 and bfloat16 "
            "(--dtype bfloat16)"
        )
    if options.block % (step := _sublanes(demand.dtype, options.out_dtype)):
        raise KernelError(f"blocks of {options.block} rows: on a TPU, in {demand.dtype}, they are multiples of {step}")
    if (scalars := 4 * demand.rows // options.block) > SCALAR_BYTES:
        raise KernelError(
            f"{demand.rows} rows in blocks of {options.block} take {scalars} bytes of scalar memory; there is room for "
            f"{SCALAR_BYTES} (--step-tokens)"
        )
    plan_of(options, demand)


def block_rows(dtype: jnp.dtype, rows_per_expert: int) -> int:
    """Twice as many as are expected, so that few experts have a second block, which meets the whole weight again.

    Up to 128 rows cost no more time than the weight takes to come; beyond, padding does.
    """
    wanted = min(2 * rows_per_expert, max(TALL, rows_per_expert), TALLEST)
    return max(LEAST, next_power_of_two(wanted))


def multiply(
    x: Float[Array, "M K"], weight: Float[Array, "E C K N"], groups: Groups, options: Options
) -> Float[Array, "M C N"]:
    (num_rows, contracted), (num_experts, parts, _, columns), block = x.shape, weight.shape, options.block
    demand = Demand(num_rows, num_experts, parts, contracted, columns, x.dtype, options.device_kind)
    plan = plan_of(options, demand)
    splits = contracted // plan.contracted
    result = jax.ShapeDtypeStruct((parts, num_rows, columns), options.out_dtype)
    product = pl.pallas_call(
        _multiply_whole if splits == 1 else _multiply_part,
        out_shape=result,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # One block at least: of an empty grid Pallas promises nothing.
            grid=(-(-columns // plan.columns), jnp.maximum(groups.live, 1), splits),
            in_specs=[
                pl.BlockSpec((block, plan.contracted), lambda column, nth, part, experts: (nth, part)),
                pl.BlockSpec(
                    (None, parts, plan.contracted, plan.columns),
                    lambda column, nth, part, experts: (experts[nth], 0, part, column),
                ),
            ],
            out_specs=pl.BlockSpec((parts, block, plan.columns), lambda column, nth, part, experts: (0, nth, column)),
            scratch_shapes=[] if splits == 1 else [pltpu.VMEM((parts, block, plan.columns), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=plan.limit
        ),
        name="grouped_matmul",
    )(groups.experts, x, weight)
    return product.swapaxes(0, 1)  # a matter of layout: nothing moves


def _multiply_whole(experts: Any, x: Any, weight: Any, out: Any) -> None:
    """x [block, K], weight [C, K, n], out [C, block, n]."""

    def multiply(part: int, columns: Any) -> None:
        out[part, :, columns] = _product(x[...], weight[part, :, columns]).astype(out.dtype)

    _each(weight.shape, multiply)


def _multiply_part(experts: Any, x: Any, weight: Any, out: Any, sums: Any) -> None:
    """x [block, k], weight [C, k, n], out [C, block, n], sums likewise, of the parts of K so far."""
    nth = pl.program_id(2)

    @pl.when(nth == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    def multiply(part: int, columns: Any) -> None:
        sums[part, :, columns] += _product(x[...], weight[part, :, columns])

    _each(weight.shape, multiply)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        out[...] = sums[...].astype(out.dtype)


def _each(shape: tuple[int, int, int], multiply: Callable[[int, Any], None]) -> None:
    """Of a weight [C, k, n] part after part, so many columns at a time that the program stays short."""
    parts, _, columns = shape
    whole = columns // WIDTH
    for part in range(parts):

        def some(nth: jax.Array, _: None, part: int = part) -> None:
            multiply(part, pl.ds(pl.multiple_of(nth * WIDTH, WIDTH), WIDTH))

        if whole:
            lax.fori_loop(0, whole, some, None)
        if rest := columns % WIDTH:
            multiply(part, pl.ds(whole * WIDTH, rest))


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """In float32; float32 operands at full precision."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, weight, precision=exact, preferred_element_type=jnp.float32)


def _sublanes(*dtypes: jnp.dtype) -> int:
    """Rows of a tile of memory, of which blocks are multiples."""
    return max(32 // jnp.dtype(dtype).itemsize for dtype in dtypes)
