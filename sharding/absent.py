"""Chips that are not here: their memory, and devices to compile for with their real compilers.

The compilers are libtpu and jax's CUDA plugin with NVIDIA's nvcc; `make deviceless` installs them into an environment
of their own. What is compiled so can be looked at, never run, and says nothing about time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from jax.experimental import topologies

# What libtpu has to find before it is loaded, so that it looks for no TPU and lets others do the same. The entry points
# set it.
ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
)
GIB: Final = 2**30


class AbsentError(ValueError):
    """A chip that is not known, or whose compiler is not installed."""


@dataclass(frozen=True)
class Chip:
    """One device as the compiler describes it: of a v4 and a 7x, whose chips have two cores, one core.

    On a v4 that is here, jax joins the two cores of a chip into one device; nobody describes that one without it.
    memory: bytes, as the makers publish them.
    """

    platform: str
    memory: int
    topologies: tuple[str, ...] = ()  # slices of a TPU from one host of four chips on, by ascending size


CHIPS: Final[Mapping[str, Chip]] = MappingProxyType(
    {
        "v4": Chip("tpu", 16 * GIB, ("v4:2x2x1", "v4:2x2x2")),
        "v5e": Chip("tpu", 16 * GIB, ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16")),
        "v5p": Chip("tpu", 95 * GIB, ("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:4x4x4", "v5p:4x8x8")),
        "v6e": Chip("tpu", 32 * GIB, ("v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:8x8", "v6e:16x16")),
        "7x": Chip("tpu", 96 * GIB, ("tpu7x:2x2x1", "tpu7x:2x2x2", "tpu7x:2x2x4", "tpu7x:4x4x4", "tpu7x:4x8x8")),
        "h200": Chip("gpu", 141 * 10**9),
    }
)


def devices(name: str, count: int) -> list[Any]:
    """`count` devices of this chip, of one node or slice; AbsentError when there is no compiler or no such slice."""
    if name not in CHIPS:
        raise AbsentError(f"chip {name!r} is not known; choose one of {', '.join(CHIPS)}")
    chip = CHIPS[name]
    try:
        found = _gpus(name, count) if chip.platform == "gpu" else _tpus(chip, count)
    except RuntimeError as error:
        raise AbsentError(f"no compiler for {name} (make deviceless installs it): {error}") from None
    if len(found) < count:
        raise AbsentError(f"{count} devices of {name}: the largest slice that is described here has {len(found)}")
    return found[:count]


def _tpus(chip: Chip, count: int) -> list[Any]:
    """Of the smallest slice that has so many, or else of the largest."""
    found: list[Any] = []
    for name in chip.topologies:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        if len(found) >= count:
            break
    return found


def _gpus(name: str, count: int) -> list[Any]:
    """Of one node. The compiler is told what it would ask of a device that is there."""
    target = (Path(__file__).parent / "gpus" / f"{name}.textproto").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=target, topology=f"1x1x{count}"
    ).devices
