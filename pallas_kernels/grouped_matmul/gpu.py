"""The grouped matrix product on NVIDIA's Hopper, in Pallas (Mosaic GPU).

Units of work, a block of rows times a tile of columns each, are shared out over as many thread
blocks as the GPU has multiprocessors (`gpu_body.py`). A warpgroup always multiplies 64 rows: with
few rows of an expert most of them are empty, which costs nothing as long as fetching the weight
takes longer than multiplying it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
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
from jaxserve.pallas_kernels.grouped_matmul.gpu_body import Body, Inputs, Raw, Shared
from jaxserve.pallas_kernels.grouped_matmul.gpu_plan import DEPTH, STAGED_COLUMNS, Plan, plan_of
from jaxserve.pallas_kernels.hopper import HOPPER, tiled

BLOCKS = (8, 16, 32, 64, 128)  # rows of a block
LEAST_ROWS = 16  # that `block_rows` returns, however few rows are expected
NUMBERS = (jnp.int8, jnp.float8_e4m3fn)  # dtypes of weights with scales
COPY_BYTES = 16  # the rows of a bulk copy begin at multiples of so many bytes
# Numbers and bytes of a row in one tile of shared memory: a longer row is copied in whole tiles.
TILE = 64
TILE_BYTES = 128


def check(options: Options, demand: Demand) -> None:
    """Raise KernelError for chips, dtypes and sizes that the kernel cannot take."""
    check_rows(options, demand)
    instead = "--grouped-matmul reference"
    if options.device_kind.startswith("NVIDIA") and not HOPPER.match(options.device_kind):
        raise KernelError(
            f"the GPU kernel is written for Hopper (H100, H200); this is {options.device_kind} "
            f"({instead})"
        )
    if demand.dtype != jnp.bfloat16 or options.out_dtype not in (jnp.bfloat16, jnp.float32):
        raise KernelError(
            f"{demand.dtype} multiplied into {options.out_dtype}: the GPU kernel multiplies "
            f"bfloat16, into that or float32 (--dtype bfloat16, or {instead})"
        )
    if demand.numbers not in (None, *NUMBERS) or demand.scales > 1:
        raise KernelError(
            f"weights of {demand.numbers} with {demand.scales} scales of a column: the GPU "
            f"kernel supports int8 and float8_e4m3fn with one (--weights int8 or fp8, or {instead})"
        )
    if options.block not in BLOCKS:
        raise KernelError(
            f"blocks of {options.block} rows: the GPU kernel supports {BLOCKS} ({instead})"
        )
    columns_fit = _fits(demand.columns, demand.stored_dtype) and _fits(
        demand.columns, options.out_dtype
    )
    if not (_fits(demand.contracted, demand.dtype) and columns_fit):
        raise KernelError(
            f"weights of {demand.contracted} x {demand.columns} in {demand.stored_dtype}: the GPU "
            f"kernel supports multiples of {TILE} x {TILE}, and fewer rows or columns than {TILE} "
            f"(32 of a float32 result) in steps of {COPY_BYTES} bytes ({instead})"
        )


def _fits(size: int, dtype: jnp.dtype) -> bool:
    """Return whether bulk copies take rows of so many numbers: whole tiles, or a part of one."""
    tile = min(TILE, TILE_BYTES // dtype.itemsize)
    if size > tile:
        return size % tile == 0
    return size * dtype.itemsize % COPY_BYTES == 0


def block_rows(dtype: jnp.dtype, rows_per_expert: int) -> int:
    """Return twice the expected rows, as a power of two within limits.

    Most experts then need one block: a second one would fetch the weight again, though from the L2
    cache.
    """
    return min(max(LEAST_ROWS, next_power_of_two(2 * rows_per_expert)), BLOCKS[-1])


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
    plan = plan_of(options, demand)

    operands = [  # in the order of `Inputs`
        groups.experts,
        groups.live.reshape(1),
        x,
        weight,
        *([] if scales is None else [scales]),
    ]

    def grouped_matmul(*refs: Any) -> None:
        count = len(operands)
        Body(plan, Inputs(*refs[:count]), refs[count], Shared(*refs[count + 1 :])).run()

    return plgpu.kernel(
        grouped_matmul,  # the name that profiles show
        out_type=jax.ShapeDtypeStruct(
            (demand.rows, demand.parts, demand.columns), options.out_dtype
        ),
        scratch_types=_scratch(plan, demand, options.out_dtype),
        grid=(plan.cores,),
        grid_names=("block",),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )(*operands)


def _scratch(plan: Plan, demand: Demand, out_dtype: jnp.dtype) -> Shared:
    """Return the shared memory and barriers of a thread block."""
    raw = None
    if plan.converts:
        raw = Raw(
            weight=tiled((plan.stages, DEPTH, plan.columns), demand.stored_dtype),
            landed=plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
            scales=plgpu.SMEM((plan.columns,), jnp.float32),
            scales_full=plgpu.Barrier(num_arrivals=1),
            scales_free=plgpu.Barrier(num_arrivals=plan.warpgroups),
        )
    return Shared(
        x=tiled((plan.stages, plan.rows, DEPTH), demand.dtype),
        weight=tiled((plan.stages, DEPTH, plan.columns), demand.dtype),
        out=tiled((plan.rows, STAGED_COLUMNS), out_dtype),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
        free=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.stages),
        raw=raw,
    )
