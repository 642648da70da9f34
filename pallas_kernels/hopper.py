"""Facts about NVIDIA's Hopper that its kernels share: device names, sizes, tiled shared memory."""

import re
from types import MappingProxyType
from typing import Any, Final

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

HOPPER: Final = re.compile(r"NVIDIA G?H(100|200|800|20)\b")
# Multiprocessors of the GPUs that have fewer, by a part of the device's name, and of all others.
CORES: Final = MappingProxyType({"PCIe": 114, "H20 ": 78})
MOST_CORES: Final = 132
FEW_CORES: Final = 2  # thread blocks in the interpreter, which runs each as a thread or two
WARPGROUP_ROWS: Final = 64  # rows of a matrix product of one warpgroup (wgmma)
SHARED_BYTES: Final = 228 * 1024  # shared memory of a multiprocessor, for all its thread blocks
# Bytes at whose multiples buffers begin; the driver keeps as much of each thread block's memory.
ALIGNMENT: Final = 1024


def cores_of(device_kind: str) -> int:
    """Return the number of multiprocessors of a device of this kind."""
    if not device_kind.startswith("NVIDIA"):
        return FEW_CORES
    return next((cores for part, cores in CORES.items() if part in f"{device_kind} "), MOST_CORES)


def tiled(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Return shared memory in the layout that matrix products and bulk copies of 2D tiles want."""
    # In bytes; of 64 columns at most.
    swizzle = min(plgpu.find_swizzle(shape[-1] * dtype.itemsize * 8), 64 * dtype.itemsize)
    # Annotated as Any, since their types say that they are abstract.
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(
        shape, dtype, transforms=(tiling((8, swizzle // dtype.itemsize)), swizzling(swizzle))
    )
