"""Devices of a plan, which need not be here: `v5e:4x4`, `v5p:2x2x2`, `h200x8`, `cpu`."""

import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractDevice, Mesh

from jaxserve.engine.device.memory import device_limit
from jaxserve.errors import ConfigError, flag_text
from jaxserve.plan.roofline import Limits
from sharding import aot_devices as absent
from sharding.chips import CHIPS, Chip
from sharding.mesh import MeshSpec

# Share of a GPU's memory that jax takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
MEMORY_FRACTION = 0.75
MAX_CPUS = 64
GPUS = re.compile(r"([a-z0-9]+?)(?:x([1-9]\d*))?")


@dataclass(frozen=True)
class Topology:
    """A number of devices of one chip.

    chip: None for the CPU of this machine. shape: of a TPU slice, in chips.
    """

    name: str
    count: int
    chip: Chip | None = None
    family: str = "cpu"
    shape: str = ""

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

    def mesh(self, axes: MeshSpec, compilers: bool = True) -> Mesh:
        """Return a mesh of the devices; ChipError if there is no compiler for them.

        compilers: False needs no compiler, and nothing can be compiled for the mesh.
        """
        if self.chip and not compilers:
            chip = self.chip
            device = AbstractDevice(
                device_kind=chip.kind, num_cores=chip.cores, platform=chip.platform
            )
            return axes.without_devices(device)
        return axes.build(self._devices())

    def _devices(self) -> list[Any]:
        if self.chip is None:
            return jax.devices("cpu")
        if self.chip.platform == "tpu":
            return absent.tpus(self.family, self.shape)
        return absent.gpus(self.family, self.count)

    def memory_limit(self, mesh: Mesh, fraction: float | None = None) -> int:
        """Return the bytes that programs may use on one device; fraction is of a GPU's memory."""
        if fraction is not None and not (self.chip and self.chip.platform == "gpu"):
            raise ConfigError(
                f"--memory-fraction is for GPUs; {self.name} gives all it has (leave it out)"
            )
        if self.chip is None:
            return device_limit(mesh)
        if self.chip.usable:
            return self.chip.usable
        return int(self.chip.memory * (MEMORY_FRACTION if fraction is None else fraction))


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
        raise ConfigError(_no_such(text))
    if count > absent.NODE:
        raise ConfigError(
            flag_text(
                "--topology",
                text,
                f"one node has {absent.NODE} GPUs (at most {name}x{absent.NODE})",
            )
        )
    return Topology(text, count, chip, name)


def _slice(text: str, family: str, shape: str) -> Topology:
    family = family.removeprefix("tpu")
    chip = CHIPS.get(family)
    if chip is None or chip.platform != "tpu":
        raise ConfigError(_no_such(text))
    if shape not in chip.slices:
        raise ConfigError(
            flag_text("--topology", text, f"slices of {family} are {', '.join(chip.slices)}")
        )
    return Topology(text, absent.chips_in(shape) * chip.devices, chip, family, shape)


def _no_such(text: str) -> str:
    return flag_text("--topology", text, f"there is no such topology ({_examples()})")


def _examples() -> str:
    names = [
        f"{name}:{chip.slices[1]}" if chip.slices else f"{name}x{absent.NODE}"
        for name, chip in CHIPS.items()
    ]
    return f"there are {', '.join(names)}, cpu and more"
