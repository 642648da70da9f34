"""Start-up check of the matmul kernels against their references, on the device that serves.

The products have the sizes that this engine's weights have on one device, with few rows and with
many.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.device.kernels.agreement import require_agreement
from jaxserve.pallas_kernels.errors import KernelError
from jaxserve.pallas_kernels.grouped_matmul import api as grouped
from jaxserve.pallas_kernels.grouped_matmul import reference as grouped_reference
from jaxserve.pallas_kernels.quantized_matmul import api as quantized
from jaxserve.pallas_kernels.quantized_matmul import reference as quantized_reference

ROWS: Final = (1, 9, 300)
ROWS_ON_CPU: Final = ROWS[:2]  # kernels run in slow interpreters there
MAX_COLUMNS: Final = 4096  # of a quantized weight
# The expert of each block of rows. Two blocks share one, and the last block holds no tokens.
BLOCK_EXPERTS: Final = (0, 1, 1, 2)
# Relative to the root mean square of the result. Weights or their products are rounded to bfloat16.
BOUND: Final = 0.05


@jax.enable_x64(False)
def check_quantized_matmul(demands: Iterable[tuple[Any, quantized.Demand]], device: Any) -> None:
    """Raise EngineError when a kernel and the reference multiply quantized weights differently.

    Args:
        demands: Kernels, each with the product that one weight demands of it. Equal ones run once.
    """
    options = quantized.Options(device.device_kind)
    distinct = {
        (kernel, _with_fewer_columns(kernel, options, demand)) for kernel, demand in demands
    }
    for kernel, demand in distinct:
        rng = np.random.default_rng(0)
        shape = (demand.contracted, *demand.columns)
        values = rng.integers(-7, 8, shape, np.int8).astype(jnp.int4)
        groups = demand.contracted // demand.group
        scales = rng.uniform(0.5, 2, (groups, *demand.columns)).astype(np.float32)
        for rows in ROWS_ON_CPU if device.platform == "cpu" else ROWS:
            x = jnp.asarray(rng.standard_normal((rows, demand.contracted)), demand.dtype)
            operands = (x, values, scales)
            _compare("--quantized-matmul", kernel, quantized_reference, options, operands, device)


def _with_fewer_columns(
    kernel: Any, options: quantized.Options, demand: quantized.Demand
) -> quantized.Demand:
    """Cut a demand to MAX_COLUMNS, if the kernel takes that.

    The reference writes the whole weight in full precision, for which a serving device may have no
    room.
    """
    first, *rest = demand.columns
    narrow = (min(first, max(MAX_COLUMNS // math.prod(rest), 1)), *rest)
    fewer = demand._replace(columns=narrow)
    try:
        kernel.check(options, fewer)
    except KernelError:
        return demand
    return fewer


@jax.enable_x64(False)
def check_grouped_matmul(
    kernel: Any, demands: Iterable[tuple[grouped.Options, grouped.Demand]], device: Any
) -> None:
    """Raise EngineError when the kernel and the reference compute expert products differently.

    The products have three experts. Rows that are padding hold NaN, which must not reach others.
    """
    distinct = {(options, demand._replace(rows=0)) for options, demand in demands}
    for options, demand in distinct:
        rng = np.random.default_rng(0)
        owners = np.minimum(BLOCK_EXPERTS, demand.experts - 1)
        blocks = len(owners)
        x = rng.standard_normal((blocks, options.block, demand.contracted)).astype(np.float32)
        x[0, 1:] = np.nan
        x[-1] = np.nan
        shape = (int(owners.max()) + 1, demand.parts, demand.contracted, demand.columns)
        weight: Any = rng.standard_normal(shape).astype(np.float32)
        scales = None
        if demand.numbers is not None:
            weight = rng.integers(-7, 8, shape, np.int8)
            scales = rng.uniform(0.5, 2, (*shape[:2], demand.scales, shape[3])).astype(np.float32)
        rows = jnp.asarray(x.reshape(-1, demand.contracted), demand.dtype)
        groups = grouped.Groups(jnp.asarray(owners, jnp.int32), jnp.int32(blocks - 1))
        operands = (rows, jnp.asarray(weight, demand.stored_dtype), groups)
        _compare(
            "--grouped-matmul", kernel, grouped_reference, options, operands, device, scales=scales
        )


def _compare(
    flag: str,
    kernel: Any,
    reference: Any,
    options: Any,
    operands: tuple[Any, ...],
    device: Any,
    **more: Any,
) -> None:
    """Multiply by the kernel and by the reference, and require that they agree.

    Args:
        operands: Rows [M, K], a weight, and what else the kernels take by position.
    """
    x = np.asarray(operands[0], np.float32)
    live = np.isfinite(x).all(-1)

    def multiply(by: Any) -> np.ndarray:
        product = jax.jit(partial(by.multiply, options=options))(*operands, **more)
        return np.asarray(product, np.float32)[live]

    with jax.default_device(device):
        ours = multiply(kernel)
        theirs = multiply(reference)
    difference = float(np.abs(ours - theirs).max() / np.sqrt(np.square(theirs).mean()))
    subject = (
        f"a product of {len(x)} x {x.shape[1]} numbers with a weight of {list(operands[1].shape)}"
    )
    require_agreement(subject, difference, BOUND, flag, device, " of its root mean square")
