"""NVIDIA's Hopper, as its kernels have to know it: which devices are one, their sizes, shared
memory for products.
"""

import re
from types import MappingProxyType
from typing import Any, Final

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

HOPPER: Final = re.compile(r"NVIDIA G?H(100|200|800|20)\b")
# Multiprocessors, by a part of the device's name; in the interpreter, which has a thread or two for
# them all.
CORES = MappingProxyType({"PCIe": 114, "H20 ": 78})
MOST_CORES = 132
FEW_CORES = 2
WARPGROUP_ROWS: Final = 64  # of a matrix product of one warpgroup (wgmma)
SHARED_BYTES: Final = 228 * 1024  # of a multiprocessor's shared memory, for its thread blocks
# every buffer begins at a multiple of it; and the driver keeps as much of each thread block's
ALIGNMENT: Final = 1024


def cores_of(device_kind: str) -> int:
    if not device_kind.startswith("NVIDIA"):
        return FEW_CORES
    return next((cores for part, cores in CORES.items() if part in f"{device_kind} "), MOST_CORES)


def tiled(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory as matrix products and bulk copies of 2D tiles want it."""
    swizzle = min(
        plgpu.find_swizzle(shape[-1] * dtype.itemsize * 8), 64 * dtype.itemsize
    )  # 64 columns, at most
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform  # abstract, says their type
    return plgpu.SMEM(
        shape, dtype, transforms=(tiling((8, swizzle // dtype.itemsize)), swizzling(swizzle))
    )
