"""The device mesh: its three axes, and how it is built from a list of devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from sharding.rules import ShardingError

AXES = ("data", "expert", "tensor")


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes.

    data and expert split rows and pages into lanes; expert splits experts too; tensor splits heads, MLP columns and the
    vocabulary. So beside a mixture of experts the attention of every expert shard has sequences of its own.
    """

    data: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ShardingError(f"mesh axis {axis} is {getattr(self, axis)}; it must be at least 1")

    @property
    def size(self) -> int:
        return self.data * self.expert * self.tensor

    @property
    def lanes(self) -> int:
        return self.data * self.expert

    def build(self, devices: Sequence[Any]) -> Mesh:
        """Mesh with Auto axis types over the first `size` devices; ShardingError when there are fewer."""
        if len(devices) < self.size:
            raise ShardingError(
                f"mesh {self.data}x{self.expert}x{self.tensor} needs {self.size} devices; {len(devices)} are present "
                "(lower --data, --expert or --tensor)"
            )
        grid = np.asarray(devices[: self.size]).reshape(self.data, self.expert, self.tensor)
        return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def without_devices(self, device: AbstractDevice) -> Mesh:
        """A mesh of such devices as far as shapes and shardings go: nothing can be compiled for it."""
        sizes = (self.data, self.expert, self.tensor)
        mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=device)
        return cast(Mesh, mesh)  # which has all of a Mesh that is asked for here


def platform(mesh: Mesh) -> str:
    """What the mesh's devices are: "cpu", "gpu" or "tpu"; they need not be here."""
    return _device(mesh).platform


def device_kind(mesh: Mesh) -> str:
    """The devices' model, in the vendor's words."""
    return _device(mesh).device_kind


def _device(mesh: Mesh) -> Any:
    return mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
