"""Sharding rules: from the letters of an array's dimensions to mesh axes."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.rules import RULES, ShardingError, partition, replicated, sharding


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return MeshSpec(data=2, expert=2, tensor=2).build(jax.devices())


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        ("DNH", (64, 8, 16), (None, "tensor", None)),
        ("NHD", (8, 16, 64), ("tensor", None, None)),
        ("EDF", (4, 64, 32), ("expert", None, "tensor")),
        ("VD", (512, 64), ("tensor", None)),
        ("APKZH", (4, 9, 2, 16, 8), (("data", "expert"), None, "tensor", None, None)),
        ("D", (7,), (None,)),
        ("", (), ()),
    ],
)
def test_partition(
    axes: str, shape: tuple[int, ...], expected: tuple[str | None, ...], mesh: Mesh
) -> None:
    assert partition(axes, shape, mesh) == PartitionSpec(*expected)


def test_shards_have_their_share_and_their_place(mesh: Mesh) -> None:
    """The axes expert and tensor split arrays, the axis data repeats them."""
    whole = np.arange(4 * 3 * 6, dtype=np.float32).reshape(4, 3, 6)
    array = jax.device_put(whole, sharding("EDF", whole.shape, mesh))
    for shard in array.addressable_shards:
        data, expert, tensor = np.argwhere(mesh.devices == shard.device)[0]
        mine = whole[2 * expert : 2 * expert + 2, :, 3 * tensor : 3 * tensor + 3]
        np.testing.assert_array_equal(shard.data, mine, err_msg=str((data, expert, tensor)))


def test_replicated(mesh: Mesh) -> None:
    array = jax.device_put(np.arange(3), replicated(mesh))
    assert len(array.addressable_shards) == 8 and all(
        s.data.shape == (3,) for s in array.addressable_shards
    )


def test_collision(mesh: Mesh) -> None:
    with pytest.raises(ShardingError) as caught:
        partition("VNF", (512, 8, 32), mesh)
    assert str(caught.value) == "axes 'VNF': V and N both map to mesh axis 'tensor'"


def test_collision_on_a_mesh_of_one() -> None:
    """A wrong declaration is refused on every mesh, not only where it is split."""
    with pytest.raises(ShardingError, match="F and F both map"):
        partition("FF", (3, 3), MeshSpec().build(jax.devices()))


def test_size_that_does_not_divide(mesh: Mesh) -> None:
    with pytest.raises(ShardingError) as caught:
        sharding("DKH", (64, 3, 16), mesh)
    assert str(caught.value) == (
        "axis K (kv heads) of size 3 does not divide by mesh axis 'tensor' of size 2 (choose a "
        "--tensor that divides 3)"
    )


def test_lanes_that_do_not_divide(mesh: Mesh) -> None:
    with pytest.raises(ShardingError) as caught:
        partition("AD", (6, 2), mesh)
    assert str(caught.value) == (
        "axis A (lanes) of size 6 does not divide by mesh axis 'data' x 'expert' of size 4 "
        "(choose a --data and a --expert that divides 6)"
    )


def test_letters_and_dimensions_must_agree(mesh: Mesh) -> None:
    with pytest.raises(ShardingError) as caught:
        partition("DF", (64, 32, 2), mesh)
    assert str(caught.value) == "axes 'DF' name 2 dimensions; the shape (64, 32, 2) has 3"


def test_other_rules(mesh: Mesh) -> None:
    assert partition("DF", (64, 7), mesh, {"D": ("data",)}) == PartitionSpec("data", None)


def test_rules_name_axes_of_the_mesh(mesh: Mesh) -> None:
    assert {axis for names in RULES.values() for axis in names} == set(mesh.axis_names)
