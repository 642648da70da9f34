"""The grouped matrix product on TPUs, in Pallas.

The grid goes over tiles of columns and, within each, over the blocks that hold rows. The blocks of
an expert follow each other, so its tile, which spans all of K, is fetched once and stays for all of
them, while Pallas's own pipeline fetches the next expert's tile. The number of blocks is the grid's
own size, known to the device alone: blocks without rows are not visited. Where a tile over all of K
does not fit into vector memory (`tpu_plan.py`), it comes in parts, anew for every block. The order
of the grid is that of jax's megablox.

Weights have to lie in memory row by row. For an argument whose rows are no multiple of 128 numbers
XLA chooses another layout, and it would copy all weights for every call: such arguments need an
explicit layout (`jax.experimental.layout`).

Weights in 8 or 4 bits are copied as they are; DEPTH numbers of a column at a time become x's dtype
in vector memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Num

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.grouped_matmul.api import (
    Demand,
    Groups,
    Options,
    check_rows,
    demand_of,
    next_power_of_two,
)
from jaxserve.pallas_kernels.grouped_matmul.reference import dequantized
from jaxserve.pallas_kernels.grouped_matmul.tpu_plan import DEPTH, WIDTH, plan_of, scales_of

DTYPES = (jnp.float32, jnp.bfloat16)
NUMBERS = (jnp.int8, jnp.float8_e4m3fn, jnp.int4)  # dtypes of weights with scales
SCALAR_BYTES = 2**19  # bytes of scalar memory that the experts of blocks may take
# Rows of a block: the fewest, those up to which padding is free, and the most.
LEAST = 16
TALL = 128
TALLEST = 256


def check(options: Options, demand: Demand) -> None:
    """Raise KernelError for dtypes and sizes that the kernel cannot take."""
    check_rows(options, demand)
    if demand.dtype not in DTYPES or options.out_dtype not in DTYPES:
        raise KernelError(
            f"{demand.dtype} multiplied into {options.out_dtype}: the TPU kernel supports "
            f"float32 and bfloat16 (--dtype bfloat16)"
        )
    if demand.numbers not in (None, *NUMBERS):
        raise KernelError(
            f"weights of {demand.numbers}: the TPU kernel supports int8, float8_e4m3fn and int4 "
            f"(--weights)"
        )
    if demand.scales > 1 and DEPTH % (group := demand.contracted // demand.scales):
        raise KernelError(
            f"scales of {group} numbers each: the TPU kernel supports groups that divide {DEPTH} "
            f"(--weights)"
        )
    step = _sublanes(demand.dtype, options.out_dtype)
    if options.block % step:
        raise KernelError(
            f"blocks of {options.block} rows: on a TPU, in {demand.dtype}, they are multiples of "
            f"{step}"
        )
    scalars = 4 * demand.rows // options.block  # bytes: an int32 for each block
    if scalars > SCALAR_BYTES:
        raise KernelError(
            f"{demand.rows} rows in blocks of {options.block} take {scalars} bytes of scalar "
            f"memory; there is room for {SCALAR_BYTES} (--step-tokens)"
        )
    plan_of(options, demand)


def block_rows(dtype: jnp.dtype, rows_per_expert: int) -> int:
    """Return twice the expected rows, within limits, as a power of two.

    With twice the rows few experts have a second block, which meets the whole weight again. Up to
    128 rows cost no more time than fetching the weight does; beyond, padding costs.
    """
    wanted = min(2 * rows_per_expert, max(TALL, rows_per_expert), TALLEST)
    return max(LEAST, next_power_of_two(wanted))


@jax.enable_x64(False)
def multiply(
    x: Float[Array, "M K"],
    weight: Num[Array, "E C K N"],
    groups: Groups,
    options: Options,
    scales: Float[Array, "E C g N"] | None = None,
) -> Float[Array, "M C N"]:
    """Return each row times its expert's weight; see `api.GroupedMatmul.multiply`."""
    demand = demand_of(x, weight, scales, options.device_kind)
    block = options.block
    num_rows, _, parts, contracted, columns = demand[:5]
    plan = plan_of(options, demand)
    splits = contracted // plan.contracted
    result = jax.ShapeDtypeStruct((parts, num_rows, columns), options.out_dtype)

    def of_expert(rows: int, in_all: int) -> pl.BlockSpec:
        """Return the blocks of an array whose third dimension has `rows` per part of K."""
        return pl.BlockSpec(
            (None, parts, rows, plan.columns),
            lambda column, nth, part, experts: (
                experts[nth],
                0,
                part if rows < in_all else 0,
                column,
            ),
        )

    kept = (weight,)
    kept_specs = (of_expert(plan.contracted, contracted),)
    if scales is not None:
        kept = (weight, scales)
        kept_specs = (*kept_specs, of_expert(scales_of(demand, plan.contracted), demand.scales))
    product = pl.pallas_call(
        _multiply_whole if splits == 1 else _multiply_part,
        out_shape=result,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # At least one block, since Pallas does not define the result of an empty grid.
            grid=(-(-columns // plan.columns), jnp.maximum(groups.live, 1), splits),
            in_specs=[
                pl.BlockSpec(
                    (block, plan.contracted), lambda column, nth, part, experts: (nth, part)
                ),
                kept_specs,
            ],
            out_specs=pl.BlockSpec(
                (parts, block, plan.columns), lambda column, nth, part, experts: (0, nth, column)
            ),
            scratch_shapes=[]
            if splits == 1
            else [pltpu.VMEM((parts, block, plan.columns), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=plan.limit
        ),
        name="grouped_matmul",
    )(groups.experts, x, kept)
    return product.swapaxes(0, 1)  # a change of layout only: XLA moves nothing


def _multiply_whole(experts: Any, x: Any, weight: Any, out: Any) -> None:
    """Multiply a block of rows with a tile that spans all of K.

    x [block, K], weight [C, K, n] and perhaps its scales [C, g, n], out [C, block, n].
    """

    def multiply(part: int, columns: Any) -> None:
        out[part, :, columns] = _product(x, weight, part, columns).astype(out.dtype)

    _each(weight[0].shape, multiply)


def _multiply_part(experts: Any, x: Any, weight: Any, out: Any, sums: Any) -> None:
    """Add the product of a block of rows with a part of a tile to the sums of the parts before.

    x [block, k], weight [C, k, n] and perhaps its scales, out and sums [C, block, n].
    """
    nth = pl.program_id(2)

    @pl.when(nth == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    def multiply(part: int, columns: Any) -> None:
        sums[part, :, columns] += _product(x, weight, part, columns)

    _each(weight[0].shape, multiply)

    @pl.when(nth == pl.num_programs(2) - 1)
    def _() -> None:
        out[...] = sums[...].astype(out.dtype)


def _each(shape: tuple[int, int, int], multiply: Callable[[int, Any], None]) -> None:
    """Call `multiply` for each part of a weight [C, k, n] and each WIDTH of its columns.

    Columns are taken in turns so that the program stays short.
    """
    parts, _, columns = shape
    for part in range(parts):
        _in_turns(
            columns, WIDTH, lambda begin, count, part=part: multiply(part, _these(begin, count))
        )


def _in_turns(size: int, step: int, work: Callable[[Any, int], None]) -> None:
    """Call `work` for every `step` of `size` items, and for those that are left.

    Args:
        work: Function called with the first item of a turn, and the number of its items.
    """
    whole = size // step
    if whole:
        lax.fori_loop(0, whole, lambda nth, _: work(nth * step, step), None)
    if rest := size % step:
        work(whole * step, rest)


def _these(begin: Any, count: int) -> Any:
    """Return a slice of a turn; a first item known to the device alone is a multiple of count."""
    return pl.ds(begin if isinstance(begin, int) else pl.multiple_of(begin, count), count)


def _product(x: Any, weight: Any, part: int, columns: Any) -> jax.Array:
    """Return a product [block, columns] in float32."""
    numbers, *scales = weight
    if not scales:
        return _dot(x[...], numbers[part, :, columns])
    return pl.run_scoped(
        partial(
            _quantized_product, x, numbers.at[part, :, columns], scales[0].at[part, :, columns]
        ),
        pltpu.VMEM((x.shape[0], columns.size), jnp.float32),
    )


def _quantized_product(x: Any, numbers: Any, scales: Any, sums: Any) -> jax.Array:
    """Return the product with a quantized weight, DEPTH numbers of K at a time, in float32.

    x [block, k], numbers [k, n], scales [g, n]; sums [block, n] is memory to add up in.
    """
    depth, _ = numbers.shape
    groups = scales.shape[0]
    sums[...] = jnp.zeros_like(sums)

    def add(begin: Any, count: int) -> None:
        some = _these(begin, count)
        tile = numbers[some]
        if groups > 1:
            size = depth // groups
            tile = dequantized(tile, scales[_these(begin // size, count // size)])
        sums[...] += _dot(x[:, some], tile.astype(x.dtype))

    _in_turns(depth, DEPTH, add)
    return sums[...] if groups > 1 else sums[...] * scales[...]


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the product in float32; float32 operands are multiplied at full precision."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, weight, precision=exact, preferred_element_type=jnp.float32)


def _sublanes(*dtypes: jnp.dtype) -> int:
    """Return the rows of a tile of memory, of which blocks of rows are multiples."""
    return max(32 // jnp.dtype(dtype).itemsize for dtype in dtypes)
