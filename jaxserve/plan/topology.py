"""Devices of a plan, which need not be here: `v5e:4x4`, `v5p:2x2x2`, `h200x8`, `cpu`.

No jax: names are checked before it is imported, and devices.py has the devices.
"""

import re
from dataclasses import dataclass

from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error
from jaxserve.sharding.chips import CHIPS, NODE, Chip, chips_in

MAX_CPUS = 64
GPUS = re.compile(r"([a-z0-9]+?)(?:x([1-9]\d*))?")


@dataclass(frozen=True)
class Limits:
    """Speed limits of one device."""

    bandwidth: float  # bytes/s of the memory
    flops: float  # FLOP/s of dense products
    int8: float = 0  # FLOP/s of products of two int8 numbers; 0 where the device has none
    fp8: float = 0  # FLOP/s of products of two fp8 numbers; 0 where the device has none

    @property
    def ridge(self) -> float:
        """FLOP per byte above which arithmetic is the bound, for products wider than 8 bits."""
        return self.flops / self.bandwidth


@dataclass(frozen=True)
class Topology:
    """A number of devices of one chip."""

    name: str
    count: int
    chip: Chip | None = None  # None for the CPU of this machine
    family: str = "cpu"
    shape: str = ""  # of a TPU slice, in chips

    @property
    def chips(self) -> int:
        """Number of chips as they are sold; some have two devices."""
        return self.count // (self.chip.devices if self.chip else 1)

    @property
    def limits(self) -> Limits | None:
        """Speed limits as the maker publishes them, for bfloat16 and 8 bits; None for a CPU."""
        chip = self.chip
        return Limits(chip.bandwidth, chip.flops, chip.int8, chip.fp8) if chip else None

    @property
    def serializes(self) -> bool:
        """True if what is compiled here can run there; a GPU has to be there for autotuning."""
        return self.chip is None or self.chip.platform == "tpu"


def parse(text: str) -> Topology:
    """Return the topology of this name; ConfigError, which lists some, if there is none."""
    family, _, shape = text.partition(":")
    if shape:
        return _slice(text, family, shape)
    found = GPUS.fullmatch(text)
    name, count = (found[1], int(found[2] or 1)) if found else (text, 0)
    if name == "cpu" and 1 <= count <= MAX_CPUS:
        return Topology(text, count)
    chip = CHIPS.get(name)
    if chip is None or chip.platform != "gpu":
        raise _no_such(text)
    if count > NODE:
        raise flag_error("--topology", text, f"one node has {NODE} GPUs (at most {name}x{NODE})")
    return Topology(text, count, chip, name)


def _slice(text: str, family: str, shape: str) -> Topology:
    family = family.removeprefix("tpu")
    chip = CHIPS.get(family)
    if chip is None or chip.platform != "tpu":
        raise _no_such(text)
    if shape not in chip.slices:
        raise flag_error("--topology", text, f"slices of {family} are {', '.join(chip.slices)}")
    return Topology(text, chips_in(shape) * chip.devices, chip, family, shape)


def _no_such(text: str) -> ConfigError:
    names = [
        f"{name}:{chip.slices[1]}" if chip.slices else f"{name}x{NODE}"
        for name, chip in CHIPS.items()
    ]
    problem = f"there is no such topology (there are {', '.join(names)}, cpu and more)"
    return flag_error("--topology", text, problem)
