"""Devices of chips that are not present, to compile for with their real compilers.

The compilers are libtpu and jax's CUDA plugin with NVIDIA's nvcc: the extra `compilers` of
pyproject.toml, which `make deviceless` installs into an environment of its own. A program compiled
this way can be inspected but never run, and tells nothing about time.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from jax.experimental import topologies

from jaxserve.sharding.chips import NODE, chip_named, chips_in
from jaxserve.sharding.errors import ChipError

# Variables that libtpu has to find before it is loaded, so that it looks for no TPU and lets other
# processes load it too. The entry points set them.
ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
)


def devices(name: str, count: int) -> list[Any]:
    """Return `count` devices of a chip, of one node or of the smallest slice that is large enough.

    ChipError when the chip is unknown, has no slice of that size, or its compiler is
    not installed.
    """
    chip = chip_named(name)
    if chip.platform == "gpu":
        return gpus(name, count)
    for shape in chip.slices:
        if chip.devices * chips_in(shape) >= count:
            return tpus(name, shape)[:count]
    limit = chip.devices * chips_in(chip.slices[-1])
    raise ChipError(
        f"{count} devices of {name}: the largest slice that is described here has {limit}"
    )


def tpus(name: str, shape: str) -> list[Any]:
    """Return all devices of a TPU slice.

    A host has four chips, with two exceptions that libtpu must be told: slices of one chip, and of
    eight on a v5e or v6e, have a single host.
    """
    family = f"tpu{name}" if name == "7x" else name
    sides = [int(n) for n in shape.split("x")]
    options = dict[str, Any]()
    if len(sides) == 2 and chips_in(shape) in (1, 8):
        options["chips_per_host_bounds"] = (*sides, 1)
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{family}:{shape}", **options
        ).devices
    except RuntimeError as error:
        raise _no_compiler(name, error) from None


def gpus(name: str, count: int) -> list[Any]:
    """Return `count` GPUs of one node.

    The compiler gets from a file under gpus/ what it would otherwise ask of a present device.
    """
    if count > NODE:
        raise ChipError(f"{count} devices of {name}: the node that is described here has {NODE}")
    target = (Path(__file__).parent / "gpus" / f"{name}.textproto").read_text()
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target, topology=f"1x1x{count}"
        ).devices
    except RuntimeError as error:
        raise _no_compiler(name, error) from None


def _no_compiler(name: str, error: RuntimeError) -> ChipError:
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return ChipError(
        f"no compiler for {name} ({reason}); pip install '.[compilers]' in the repository installs "
        f"it, into an environment of its own: with libtpu installed, every start of jax looks for "
        f"a TPU"
    )
