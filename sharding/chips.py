"""The chips that are supported, with their vendors' figures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from jaxserve.sharding.errors import ChipError

GIB: Final = 2**30
NODE: Final = 8  # GPUs that NVLink joins
# Shapes of TPU slices, in chips: in two dimensions, and in three beyond the first sizes.
PLANE: Final = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES: Final = ("4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
TORUS: Final = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", *CUBES)


@dataclass(frozen=True)
class Chip:
    """One device as its compiler describes it, with the vendor's figures.

    A v4 and a 7x have two cores per chip, each of which is a device here (`devices` is 2). On an
    actual v4 jax joins the two cores into one device, which no compiler describes.
    """

    platform: str  # tpu or gpu
    kind: str  # name that jax.Device.device_kind reports
    memory: int  # bytes
    bandwidth: float  # of the memory, bytes/s
    flops: float  # dense bfloat16 FLOP/s
    link: float  # bytes/s that leave a device over the interconnect, all ports together
    # Bytes that programs may take, as libtpu reports them when memory runs out; None where the
    # runtime is configured with a share (GPUs).
    usable: int | None = None
    cores: int = 1  # cores that a kernel sees
    devices: int = 1  # devices of one chip as it is sold
    slices: tuple[str, ...] = ()  # shapes of TPU slices in chips, by ascending size
    # Operations/s of products of two such numbers; 0 where the chip has no native product of them.
    int8: float = 0
    fp8: float = 0  # e4m3fn


def _tpu(
    kind: str,
    memory: int,
    usable: float,
    bandwidth: float,
    flops: float,
    link: float,
    int8: float = 0,
    fp8: float = 0,
    **more: Any,
) -> Chip:
    """Return a TPU, given in GiB, GB/s and TFLOP/s."""
    return Chip(
        platform="tpu",
        kind=kind,
        memory=memory * GIB,
        bandwidth=bandwidth * 1e9,
        flops=flops * 1e12,
        link=link * 1e9,
        usable=int(usable * GIB),
        int8=int8 * 1e12 if int8 else 0,
        fp8=fp8 * 1e12 if fp8 else 0,
        **more,
    )


# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; link is half of the "bidirectional"
# bandwidth, of a v4 6 x 50 GB/s (Jouppi et al., ISCA 2023). H200: NVIDIA's data sheet, half of the
# FLOP/s that it gives with sparsity. A v4 multiplies int8 no faster than bfloat16, because it
# widens int8 first. The fp8 format of a v6e is not e4m3fn.
CHIPS: Final[Mapping[str, Chip]] = MappingProxyType(
    {
        # Memory and usable in GiB, bandwidth in GB/s, flops in TFLOP/s, link in GB/s.
        "v4": _tpu("TPU v4", 16, 15.25, 600, 137.5, 150, slices=TORUS, devices=2),
        "v5e": _tpu("TPU v5 lite", 16, 15.75, 819, 197, 200, slices=PLANE, int8=394),
        "v5p": _tpu("TPU v5", 95, 95.73, 2765, 459, 600, slices=TORUS, cores=2, int8=918),
        "v6e": _tpu("TPU v6 lite", 32, 31.24, 1640, 918, 400, slices=PLANE, int8=1836),
        "7x": _tpu("TPU7x", 96, 94.74, 3690, 1153.5, 300, slices=TORUS, devices=2, fp8=2307),
        "h200": Chip(
            platform="gpu",
            kind="NVIDIA H200",
            memory=150_754_820_096,
            bandwidth=4800e9,
            flops=989e12,
            link=450e9,
            cores=132,
            int8=1979e12,
            fp8=1979e12,
        ),
    }
)


def chip_named(name: str) -> Chip:
    """Return the chip of this name; ChipError when CHIPS has none."""
    if name not in CHIPS:
        raise ChipError(f"chip {name!r} is not known; choose one of {', '.join(CHIPS)}")
    return CHIPS[name]


def chips_in(shape: str) -> int:
    """Return the number of chips of a slice: "2x2x4" has 16."""
    return math.prod(map(int, shape.split("x")))
