"""Meshes: sizes, the order of devices, and what is refused."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxserve.sharding.errors import ShardingError
from jaxserve.sharding.mesh import AXES, MeshSpec, crosses_slow_links, spans_hosts


def test_default_is_one_device() -> None:
    mesh = MeshSpec().build(jax.devices())
    assert MeshSpec().size == 1 and dict(mesh.shape) == {"data": 1, "expert": 1, "tensor": 1}
    assert mesh.devices.ravel().tolist() == jax.devices()[:1]


@pytest.mark.parametrize(
    "spec", [MeshSpec(2, 2, 2), MeshSpec(tensor=8), MeshSpec(data=3), MeshSpec(data=2, expert=3)]
)
def test_mesh_has_the_asked_sizes_over_the_first_devices(spec: MeshSpec) -> None:
    mesh = spec.build(tuple(jax.devices()))
    assert mesh.axis_names == AXES == ("data", "expert", "tensor")
    assert mesh.devices.shape == (spec.data, spec.expert, spec.tensor)
    assert mesh.devices.ravel().tolist() == jax.devices()[: spec.size]
    assert mesh.axis_types == (AxisType.Auto,) * 3


def test_tensor_neighbours_are_adjacent_devices() -> None:
    """Groups of tensor parallelism, which communicates most, are runs of the device list."""
    mesh = MeshSpec(data=2, expert=2, tensor=2).build(jax.devices())
    assert [d.id for d in mesh.devices[1, 0]] == [4, 5]


def test_too_few_devices() -> None:
    with pytest.raises(ShardingError) as caught:
        MeshSpec(data=2, tensor=4).build(jax.devices()[:7])
    assert str(caught.value) == (
        "mesh 2x1x4 needs 8 devices; 7 are present (lower --data, --expert or --tensor)"
    )


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -2])
def test_sizes_below_one(axis: str, size: int) -> None:
    with pytest.raises(ShardingError) as caught:
        MeshSpec(**{axis: size})
    assert str(caught.value) == f"mesh axis {axis} is {size}; it must be at least 1 (--{axis})"


@dataclass(frozen=True)
class FakeDevice:
    """The attributes of an absent device that a mesh reads."""

    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "gpu"


class FakeMesh:
    """The attributes of a mesh that are read; jax makes no mesh of such devices."""

    def __init__(self, spec: MeshSpec, devices: list[Any]):
        self.devices = np.empty((spec.data, spec.expert, spec.tensor), object)
        self.devices.flat = devices
        self.shape = {"data": spec.data, "expert": spec.expert, "tensor": spec.tensor}


def test_hosts_follow_each_other_whatever_the_order_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts are adjacent even when device ids are not.

    The four hosts of a v5e-16 have two by two chips each, whose ids run along the rows of the
    whole slice.
    """
    devices = [FakeDevice(id, process_index=id % 4 // 2 + 2 * (id // 8)) for id in range(16)]
    monkeypatch.setattr("jaxserve.sharding.mesh.Mesh", lambda grid, axes, axis_types: grid)
    grid: Any = MeshSpec(data=4, tensor=4).build(devices)
    assert [[d.process_index for d in lane] for lane in grid[:, 0]] == [[i] * 4 for i in range(4)]
    assert [d.id for d in grid[0, 0]] == [0, 1, 4, 5]


def test_no_host_is_left_without_a_part() -> None:
    devices = [FakeDevice(id, process_index=id // 2) for id in range(4)]
    with pytest.raises(ShardingError) as caught:
        MeshSpec(tensor=2).build(devices)
    assert str(caught.value) == (
        "mesh 1x1x2 takes 2 of 4 devices and none of host 1 (raise --data, --expert or --tensor, "
        "or lower --hosts)"
    )


@pytest.mark.parametrize("platform, slow", [("gpu", True), ("tpu", False)])
def test_what_leaves_a_host_leaves_no_slice(platform: str, slow: bool) -> None:
    """The chips of a slice are linked to each other across hosts."""
    devices = [FakeDevice(id, process_index=id // 2, platform=platform) for id in range(4)]
    wide: Any = FakeMesh(MeshSpec(tensor=4), devices)
    narrow: Any = FakeMesh(MeshSpec(data=2, tensor=2), devices)
    assert spans_hosts(wide) and spans_hosts(narrow)
    assert crosses_slow_links(wide, "tensor") is slow
    assert crosses_slow_links(narrow, "data") is slow and not crosses_slow_links(narrow, "tensor")


def test_slices_are_linked_slowly() -> None:
    devices = [
        FakeDevice(id, process_index=id // 2, slice_index=id // 2, platform="tpu")
        for id in range(4)
    ]
    mesh: Any = FakeMesh(MeshSpec(tensor=4), devices)
    assert crosses_slow_links(mesh, "tensor")
