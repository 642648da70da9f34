"""The device mesh: its three axes, and how it is built from a list of devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxserve.sharding.errors import ShardingError

AXES = ("data", "expert", "tensor")


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes.

    data and expert split rows and pages into lanes; expert also splits experts; tensor splits
    heads, MLP columns and the vocabulary. In a mixture of experts every expert shard therefore
    runs attention for sequences of its own.
    """

    data: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ShardingError(
                    f"mesh axis {axis} is {getattr(self, axis)}; it must be at least 1 (--{axis})"
                )

    @property
    def size(self) -> int:
        return self.data * self.expert * self.tensor

    @property
    def lanes(self) -> int:
        return self.data * self.expert

    def build(self, devices: Sequence[Any]) -> Mesh:
        """Build a mesh with Auto axis types over the first `size` devices, host after host.

        In that order the tensor axis stays inside a host where it fits. ShardingError when there
        are fewer devices, or when a host would take no part.
        """
        if len(devices) < self.size:
            raise ShardingError(
                f"mesh {self} needs {self.size} devices; {len(devices)} are present "
                "(lower --data, --expert or --tensor)"
            )
        by_host = sorted(devices, key=lambda device: device.process_index)
        taken = by_host[: self.size]
        busy_hosts = {device.process_index for device in taken}
        all_hosts = {device.process_index for device in devices}
        idle = all_hosts - busy_hosts
        if idle:
            raise ShardingError(
                f"mesh {self} takes {self.size} of {len(devices)} devices and none of host "
                f"{min(idle)} (raise --data, --expert or --tensor, or lower --hosts)"
            )
        grid = np.asarray(taken).reshape(self.data, self.expert, self.tensor)
        return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def without_devices(self, device: AbstractDevice) -> Mesh:
        """Build a mesh for shapes and shardings alone; nothing can be compiled for it."""
        sizes = (self.data, self.expert, self.tensor)
        mesh = AbstractMesh(
            sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=device
        )
        # An AbstractMesh has all of a Mesh that shapes and shardings need.
        return cast(Mesh, mesh)

    def __str__(self) -> str:
        return f"{self.data}x{self.expert}x{self.tensor}"


def spans_hosts(mesh: Mesh) -> bool:
    """Return whether the mesh has devices of several processes."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def crosses_slow_links(mesh: Mesh, axis: str) -> bool:
    """Return whether devices along the axis are connected by a network slower than a host's.

    That is the case when they lie on several hosts. The hosts of one TPU slice share the fast
    interconnect, so TPUs count by slice.
    """

    def fabric(device: Any) -> int:
        return (
            getattr(device, "slice_index", 0) if device.platform == "tpu" else device.process_index
        )

    if isinstance(mesh, AbstractMesh):  # its devices have no location
        return False
    lines = np.moveaxis(mesh.devices, AXES.index(axis), -1).reshape(-1, mesh.shape[axis])
    return any(len({fabric(device) for device in line}) > 1 for line in lines)


def platform(mesh: Mesh) -> str:
    """Return "cpu", "gpu" or "tpu"; the devices need not be present."""
    return _device(mesh).platform


def device_kind(mesh: Mesh) -> str:
    """Return the devices' model as the vendor names it, such as "TPU v5 lite"."""
    return _device(mesh).device_kind


def compiler_version(mesh: Mesh) -> str:
    """Return the version of the runtime that compiles for present devices, as jax names it."""
    return mesh.devices.flat[0].client.platform_version


def compute_capability(mesh: Mesh) -> tuple[int, ...] | None:
    """Return the CUDA compute capability, (9, 0) for Hopper; None if the devices have none.

    Devices of a mesh without devices may lack it even when they stand for CUDA GPUs.
    """
    parts = str(getattr(_device(mesh), "compute_capability", "")).split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None


def _device(mesh: Mesh) -> Any:
    return mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
