"""The chips that are supported, with their vendors' figures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

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


# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; link is half of the "bidirectional"
# bandwidth, of a v4 6 x 50 GB/s (Jouppi et al., ISCA 2023). H200: NVIDIA's data sheet, half of the
# FLOP/s that it gives with sparsity. A v4 multiplies int8 no faster than bfloat16, because it
# widens int8 first. The fp8 format of a v6e is not e4m3fn.
CHIPS: Final[Mapping[str, Chip]] = MappingProxyType(
    {
        "v4": Chip(
            platform="tpu",
            kind="TPU v4",
            memory=16 * GIB,
            bandwidth=600e9,
            flops=137.5e12,
            link=150e9,
            usable=int(15.25 * GIB),
            devices=2,
            slices=TORUS,
        ),
        "v5e": Chip(
            platform="tpu",
            kind="TPU v5 lite",
            memory=16 * GIB,
            bandwidth=819e9,
            flops=197e12,
            link=200e9,
            usable=int(15.75 * GIB),
            slices=PLANE,
            int8=394e12,
        ),
        "v5p": Chip(
            platform="tpu",
            kind="TPU v5",
            memory=95 * GIB,
            bandwidth=2765e9,
            flops=459e12,
            link=600e9,
            usable=int(95.73 * GIB),
            cores=2,
            slices=TORUS,
            int8=918e12,
        ),
        "v6e": Chip(
            platform="tpu",
            kind="TPU v6 lite",
            memory=32 * GIB,
            bandwidth=1640e9,
            flops=918e12,
            link=400e9,
            usable=int(31.24 * GIB),
            slices=PLANE,
            int8=1836e12,
        ),
        "7x": Chip(
            platform="tpu",
            kind="TPU7x",
            memory=96 * GIB,
            bandwidth=3690e9,
            flops=1153.5e12,
            link=300e9,
            usable=int(94.74 * GIB),
            devices=2,
            slices=TORUS,
            fp8=2307e12,
        ),
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
