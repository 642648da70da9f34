"""Devices of a topology: a mesh of them, and their memory."""

from typing import Any

import jax
from jax.sharding import AbstractDevice, Mesh

from jaxserve.engine.device.memory import device_limit
from jaxserve.errors import ConfigError
from jaxserve.plan.flags import MEMORY_FRACTION
from jaxserve.plan.topology import Topology
from jaxserve.sharding import aot_devices as absent
from jaxserve.sharding.mesh import MeshSpec


def mesh_on(topology: Topology, axes: MeshSpec, compilers: bool = True) -> Mesh:
    """Return a mesh of the devices; ChipError if there is no compiler for them.

    If `compilers` is False, no compiler is needed, and nothing can be compiled for the mesh.
    """
    if topology.chip and not compilers:
        chip = topology.chip
        device = AbstractDevice(device_kind=chip.kind, num_cores=chip.cores, platform=chip.platform)
        return axes.without_devices(device)
    return axes.build(_devices(topology))


def _devices(topology: Topology) -> list[Any]:
    if topology.chip is None:
        return jax.devices("cpu")
    if topology.chip.platform == "tpu":
        return absent.tpus(topology.family, topology.shape)
    return absent.gpus(topology.family, topology.count)


def memory_limit(topology: Topology, mesh: Mesh, fraction: float | None = None) -> int:
    """Return the bytes that programs may use on one device; `fraction` is of a GPU's memory."""
    chip = topology.chip
    if fraction is not None and not (chip and chip.platform == "gpu"):
        raise ConfigError(
            f"--memory-fraction is for GPUs; {topology.name} gives all it has (leave it out)"
        )
    if chip is None:
        return device_limit(mesh)
    if chip.usable:
        return chip.usable
    return int(chip.memory * (MEMORY_FRACTION if fraction is None else fraction))
