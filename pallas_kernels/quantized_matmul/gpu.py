"""The quantized matrix product on NVIDIA's Hopper, in Pallas (Mosaic GPU).

The kernel computes the transposed product: the weight is the operand that a tensor core can take
from registers, where its numbers become bfloat16. So the numbers are read from memory once, in 4
bits, and written nowhere else. Numbers that are summed up lie beside each other in memory, as wgmma
wants them (jaxserve.sharding.params: `summed`). The products of a group add up in registers of
their own and are then multiplied by the group's scale, which is as exact as one scale per column.

Units of work, a tile of columns times a tile of rows each, are shared out over as many thread
blocks as the GPU has multiprocessors (`gpu_body.py`). Where there are fewer units, K is split, and
XLA adds up the parts.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int4

from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.hopper import HOPPER, WARPGROUP_ROWS, tiled
from jaxserve.pallas_kernels.quantized_matmul.api import GROUPS, Demand, Options
from jaxserve.pallas_kernels.quantized_matmul.gpu_body import Body, Inputs, Shared
from jaxserve.pallas_kernels.quantized_matmul.gpu_plan import DEPTHS, WARPGROUPS, Plan, plan_of

# Columns of the weight that are copied together: an array has a multiple of them.
STEP = 8


def check(options: Options, demand: Demand) -> None:
    """Raise KernelError for chips, dtypes and sizes that the kernel cannot take."""
    instead = "--quantized-matmul reference"
    if options.device_kind.startswith("NVIDIA") and not HOPPER.match(options.device_kind):
        raise KernelError(
            f"the GPU kernel is written for Hopper (H100, H200); this is {options.device_kind} "
            f"({instead})"
        )
    if demand.dtype != jnp.bfloat16:
        raise KernelError(
            f"activations of {demand.dtype}: the GPU kernel multiplies bfloat16 (--dtype "
            f"bfloat16, or {instead})"
        )
    if demand.group not in GROUPS:
        raise KernelError(
            f"groups of {demand.group} numbers: the GPU kernel supports {GROUPS} ({instead})"
        )
    columns = math.prod(demand.columns)
    if demand.contracted % DEPTHS[-1] or columns % STEP:
        raise KernelError(
            f"a weight of {demand.contracted} x {columns}: the GPU kernel supports multiples of "
            f"{DEPTHS[-1]} x {STEP} ({instead})"
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
    columns = math.prod(numbers.shape[1:])
    plan = plan_of(rows, contracted, columns, contracted // len(scales), options.device_kind)
    # The order in which the weight lies in memory: nothing is moved.
    by_column = jnp.moveaxis(numbers, 0, -1).reshape(columns, contracted)

    def quantized_matmul(*refs: Any) -> None:
        Body(plan, Inputs(*refs[:3]), refs[3], Shared(*refs[4:])).run()

    x = jnp.pad(x, ((0, -rows % plan.staged), (0, 0)))
    parts = plgpu.kernel(
        quantized_matmul,  # the name that profiles show
        out_type=jax.ShapeDtypeStruct((plan.splits, columns, len(x)), jnp.float32),
        scratch_types=_scratch(plan),
        grid=(plan.cores,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )(x, by_column, scales.reshape(len(scales), columns))
    return parts.sum(0)[:, :rows].T.reshape(rows, *numbers.shape[1:])


def _scratch(plan: Plan) -> Shared:
    """Return the shared memory and barriers of a thread block."""
    bfloat16 = jnp.dtype(jnp.bfloat16)
    float32 = jnp.dtype(jnp.float32)
    return Shared(
        x=_tiled((plan.stages, plan.rows, plan.depth), bfloat16, min(plan.group, 64)),
        numbers=_tiled((plan.stages, plan.columns, plan.depth), jnp.dtype(jnp.int4), plan.depth),
        scales=plgpu.SMEM((plan.stages, plan.scales, plan.columns), float32),
        out=tiled((WARPGROUPS * WARPGROUP_ROWS, plan.staged), float32),
        full=plgpu.Barrier(num_arrivals=3, num_barriers=plan.stages),
        free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=plan.stages),
    )


def _tiled(shape: tuple[int, ...], dtype: jnp.dtype, wide: int) -> Any:
    """Return shared memory in tiles of `wide` columns.

    Of operands of a product, the width is that of the operand in registers.
    """
    # Annotated as Any, since their types say that they are abstract.
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(tiling((8, wide)), swizzling(wide * jax.dtypes.itemsize_bits(dtype) // 8)),
    )
