"""Chips that are not here: their figures, and devices to compile for with their real compilers.

The compilers are libtpu and jax's CUDA plugin with NVIDIA's nvcc: the extra `compilers` of
pyproject.toml, which `make deviceless` installs into an environment of its own. What is compiled so
can be looked at, never run, and says nothing about time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from jax.experimental import topologies

# What libtpu has to find before it is loaded, so that it looks for no TPU and lets others do the
# same. The entry points set it.
ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
)
GIB: Final = 2**30
PLANE: Final = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES: Final = ("4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
NODE: Final = 8  # GPUs that NVLink joins


class AbsentError(ValueError):
    """A chip that is not known, or whose compiler is not installed."""


@dataclass(frozen=True)
class Chip:
    """One device as the compiler describes it: of a v4 and a 7x, whose chips have two cores, one
    core.

    On a v4 that is here, jax joins the two cores of a chip into one device; nobody describes that
    one without it. Makers' figures: memory, in bytes; bandwidth of it, bytes/s; flops, dense
    bfloat16 FLOP/s; int8, fp8 (e4m3fn), that of products of two such numbers, 0 where it does not
    multiply them as they are; link, bytes/s that the interconnect takes away from a device, all
    ports together. usable: bytes that programs may take, as libtpu says when there are not enough;
    None: whatever the runtime is told to take (a fraction, on a GPU).
    """

    platform: str
    kind: str  # as the devices say it
    memory: int
    bandwidth: float
    flops: float
    link: float
    usable: int | None = None
    cores: int = 1  # that a kernel sees
    devices: int = 1  # of one chip, as it is sold
    slices: tuple[str, ...] = ()  # of a TPU, in chips, by ascending size
    int8: float = 0
    fp8: float = 0


# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; link is half of the "bidirectional"
# bandwidth, of a v4 6 x 50 GB/s (Jouppi et al., ISCA 2023). H200: NVIDIA's data sheet, half of the
# FLOP/s that it gives with sparsity. A v4 multiplies int8 no faster than bfloat16, having widened
# it. Fp8 of a v6e is another kind than e4m3fn.
CHIPS: Final[Mapping[str, Chip]] = MappingProxyType(
    {
        "v4": Chip(
            *("tpu", "TPU v4", 16 * GIB, 600e9, 137.5e12, 150e9, int(15.25 * GIB)),
            devices=2,
            slices=("2x2x1", "2x2x2", "2x2x4", "2x4x4", *CUBES),
        ),
        "v5e": Chip(
            "tpu",
            "TPU v5 lite",
            16 * GIB,
            819e9,
            197e12,
            200e9,
            int(15.75 * GIB),
            slices=PLANE,
            int8=394e12,
        ),
        "v5p": Chip(
            *("tpu", "TPU v5", 95 * GIB, 2765e9, 459e12, 600e9, int(95.73 * GIB)),
            cores=2,
            slices=("2x2x1", "2x2x2", "2x2x4", "2x4x4", *CUBES),
            int8=918e12,
        ),
        "v6e": Chip(
            *("tpu", "TPU v6 lite", 32 * GIB, 1640e9, 918e12, 400e9, int(31.24 * GIB)),
            slices=PLANE,
            int8=1836e12,
        ),
        "7x": Chip(
            *("tpu", "TPU7x", 96 * GIB, 3690e9, 1153.5e12, 300e9, int(94.74 * GIB)),
            devices=2,
            slices=("2x2x1", "2x2x2", "2x2x4", "2x4x4", *CUBES),
            fp8=2307e12,
        ),
        "h200": Chip(
            "gpu",
            "NVIDIA H200",
            150_754_820_096,
            4800e9,
            989e12,
            450e9,
            cores=132,
            int8=1979e12,
            fp8=1979e12,
        ),
    }
)


def devices(name: str, count: int) -> list[Any]:
    """`count` devices of this chip, of one node or of the smallest slice that has so many.

    AbsentError when there is no compiler or no such slice.
    """
    chip = known(name)
    if chip.platform == "gpu":
        return gpus(name, count)
    fitting = [shape for shape in chip.slices if chip.devices * chips_in(shape) >= count]
    if not fitting:
        most = chip.devices * chips_in(chip.slices[-1])
        raise AbsentError(
            f"{count} devices of {name}: the largest slice that is described here has {most}"
        )
    return tpus(name, fitting[0])[:count]


def known(name: str) -> Chip:
    if name not in CHIPS:
        raise AbsentError(f"chip {name!r} is not known; choose one of {', '.join(CHIPS)}")
    return CHIPS[name]


def chips_in(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))


def tpus(name: str, shape: str) -> list[Any]:
    """All devices of a slice. A host of it has four chips, but for a slice of one, and a v5e and
    v6e of eight.
    """
    family = f"tpu{name}" if name == "7x" else name
    sides = [int(n) for n in shape.split("x")]
    lone = (
        {"chips_per_host_bounds": (*sides, 1)}
        if len(sides) == 2 and chips_in(shape) in (1, 8)
        else {}
    )
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{family}:{shape}", **lone
        ).devices
    except RuntimeError as error:
        raise _no_compiler(name, error) from None


def gpus(name: str, count: int) -> list[Any]:
    """Of one node. The compiler is told what it would ask of a device that is there."""
    if count > NODE:
        raise AbsentError(f"{count} devices of {name}: the node that is described here has {NODE}")
    target = (Path(__file__).parent / "gpus" / f"{name}.textproto").read_text()
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target, topology=f"1x1x{count}"
        ).devices
    except RuntimeError as error:
        raise _no_compiler(name, error) from None


def _no_compiler(name: str, error: RuntimeError) -> AbsentError:
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return AbsentError(
        f"no compiler for {name} ({reason}); pip install '.[compilers]' in the repository brings "
        f"them, into an "
        "environment of its own: with libtpu installed, every start of jax looks for a TPU"
    )
