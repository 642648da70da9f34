"""Meshes: sizes, the order of devices, and what is refused."""

import jax
import pytest
from jax.sharding import AxisType

from sharding.mesh import AXES, MeshSpec
from sharding.rules import ShardingError


def test_default_is_one_device() -> None:
    mesh = MeshSpec().build(jax.devices())
    assert MeshSpec().size == 1 and dict(mesh.shape) == {"data": 1, "expert": 1, "tensor": 1}
    assert mesh.devices.ravel().tolist() == jax.devices()[:1]


@pytest.mark.parametrize("spec", [MeshSpec(2, 2, 2), MeshSpec(tensor=8), MeshSpec(data=3), MeshSpec(data=2, expert=3)])
def test_mesh_has_the_asked_sizes_over_the_first_devices(spec: MeshSpec) -> None:
    mesh = spec.build(tuple(jax.devices()))
    assert mesh.axis_names == AXES == ("data", "expert", "tensor")
    assert mesh.devices.shape == (spec.data, spec.expert, spec.tensor)
    assert mesh.devices.ravel().tolist() == jax.devices()[: spec.size]
    assert mesh.axis_types == (AxisType.Auto,) * 3


def test_tensor_neighbours_are_adjacent_devices() -> None:
    """Tensor parallelism talks most: its groups are runs of the device list."""
    mesh = MeshSpec(data=2, expert=2, tensor=2).build(jax.devices())
    assert [d.id for d in mesh.devices[1, 0]] == [4, 5]


def test_too_few_devices() -> None:
    with pytest.raises(ShardingError) as caught:
        MeshSpec(data=2, tensor=4).build(jax.devices()[:7])
    assert str(caught.value) == ("mesh 2x1x4 needs 8 devices; 7 are present (lower --data, --expert or --tensor)")


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -2])
def test_sizes_below_one(axis: str, size: int) -> None:
    with pytest.raises(ShardingError) as caught:
        MeshSpec(**{axis: size})
    assert str(caught.value) == f"mesh axis {axis} is {size}; it must be at least 1"
