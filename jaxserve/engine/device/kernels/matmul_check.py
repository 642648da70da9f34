"""Before anything is answered: products that kernels compute, beside the reference, on the device
that will run them.

Of the sizes that this engine's weights have on one device, with few rows and with many.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import EngineError
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_matmul import api as grouped
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.quantized_matmul import api as quantized
from pallas_kernels.quantized_matmul import reference as quantized_reference

ROWS: Final = (1, 9, 300)  # on a CPU, where kernels run in interpreters, the first two
COLUMNS: Final = 4096  # of a weight, at most
EXPERTS: Final = (0, 1, 1, 2)  # whose the blocks of rows are; the last one holds none
BOUND: Final = (
    0.05  # of a result's root mean square: weights or their products are rounded to bfloat16
)


def prove_quantized(asked: Iterable[tuple[Any, quantized.Demand]], device: Any) -> None:
    """EngineError where a kernel and the reference differ. asked: kernels, and what a weight asks
    of them.
    """
    options = quantized.Options(device.device_kind)
    for kernel, demand in {
        (kernel, _narrowed(kernel, options, demand)) for kernel, demand in asked
    }:
        rng = np.random.default_rng(0)
        numbers = rng.integers(-7, 8, (demand.contracted, *demand.columns), np.int8).astype(
            jnp.int4
        )
        scales = rng.uniform(0.5, 2, (demand.contracted // demand.group, *demand.columns)).astype(
            np.float32
        )
        for rows in ROWS[:2] if device.platform == "cpu" else ROWS:
            x = jnp.asarray(rng.standard_normal((rows, demand.contracted)), demand.dtype)
            _compare(
                "--quantized-matmul",
                kernel,
                quantized_reference,
                options,
                (x, numbers, scales),
                device,
            )


def _narrowed(
    kernel: Any, options: quantized.Options, demand: quantized.Demand
) -> quantized.Demand:
    """With fewer columns, where the kernel takes them: the reference writes the weight in full
    precision.
    """
    first, *rest = demand.columns
    fewer = demand._replace(columns=(min(first, max(COLUMNS // math.prod(rest), 1)), *rest))
    try:
        kernel.check(options, fewer)
    except KernelError:
        return demand
    return fewer


def prove_grouped(
    kernel: Any, asked: Iterable[tuple[grouped.Options, grouped.Demand]], device: Any
) -> None:
    """The same of experts' products, of three of them; rows that are padding are NaN."""
    for options, demand in {(options, demand._replace(rows=0)) for options, demand in asked}:
        rng, owners = np.random.default_rng(0), np.minimum(EXPERTS, demand.experts - 1)
        x = rng.standard_normal((len(owners), options.block, demand.contracted)).astype(np.float32)
        x[0, 1:], x[-1] = np.nan, np.nan
        shape = (int(owners.max()) + 1, demand.parts, demand.contracted, demand.columns)
        weight: Any = rng.standard_normal(shape).astype(np.float32)
        scales = None
        if demand.numbers is not None:
            weight = rng.integers(-7, 8, shape, np.int8)
            scales = rng.uniform(0.5, 2, (*shape[:2], demand.scales, shape[3])).astype(np.float32)
        rows = jnp.asarray(x.reshape(-1, demand.contracted), demand.dtype)
        groups = grouped.Groups(jnp.asarray(owners, jnp.int32), jnp.int32(len(owners) - 1))
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
    x = np.asarray(operands[0], np.float32)
    with jax.default_device(device):
        ours, theirs = (
            np.asarray(
                jax.jit(partial(each.multiply, options=options))(*operands, **more), np.float32
            )
            for each in (kernel, reference)
        )
    live = np.isfinite(x).all(-1)
    ours, theirs = ours[live], theirs[live]
    apart = float(np.abs(ours - theirs).max() / np.sqrt(np.square(theirs).mean()))
    if not apart <= BOUND:
        raise EngineError(
            f"a product of {len(x)} x {x.shape[1]} numbers with a weight of "
            f"{list(operands[1].shape)} differs from the "
            f"reference by {apart:.2g} of what it is on {device.device_kind} (at most {BOUND} is "
            f"rounding): start with "
            f"{flag} reference, and please report this"
        )
