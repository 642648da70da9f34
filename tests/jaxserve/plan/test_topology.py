"""Names of topologies, and what is known of their devices without their compilers."""

import jax
import pytest

from jaxserve.errors import ConfigError
from jaxserve.plan.devices import memory_limit, mesh_on
from jaxserve.plan.topology import parse
from jaxserve.sharding.chips import CHIPS, GIB
from jaxserve.sharding.mesh import MeshSpec, device_kind, platform
from jaxserve.sharding.params import ParamSpec


@pytest.mark.parametrize(
    ("name", "devices", "chips"),
    [
        ("v5e:4x4", 16, 16),
        ("v6e:2x4", 8, 8),
        ("v5p:2x2x2", 8, 8),
        ("v4:2x2x1", 8, 4),
        ("7x:2x2x1", 8, 4),
        ("tpu7x:2x2x2", 16, 8),
        ("h200", 1, 1),
        ("h200x8", 8, 8),
        ("cpu", 1, 1),
        ("cpux4", 4, 4),
    ],
)
def test_what_exists(name: str, devices: int, chips: int) -> None:
    assert (parse(name).count, parse(name).chips) == (devices, chips)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("v5e:3x3", "slices of v5e are 1x1, 2x2, 2x4, 4x4"),
        ("v5e:4x4x4", "slices of v5e are"),
        ("v5p:4x4", "slices of v5p are"),
        ("v5e", "no such topology"),
        ("v5ex4", "no such topology"),
        ("v9:2x2", "no such topology"),
        ("h200:2x2", "no such topology"),
        ("h200x9", "one node has 8 GPUs"),
        ("h200x0", "no such topology"),
        ("cpux0", "no such topology"),
        ("", "no such topology"),
        ("v5e:", "no such topology"),
    ],
)
def test_what_does_not(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "7x:2x2x1", "h200x8"]
)
def test_a_mesh_without_devices(name: str) -> None:
    """The mesh knows the kind of its devices, and shards shapes."""
    topology = parse(name)
    assert topology.chip
    mesh = mesh_on(topology, MeshSpec(data=2, tensor=4), compilers=False)
    assert (platform(mesh), device_kind(mesh)) == (topology.chip.platform, topology.chip.kind)
    array = ParamSpec("DKQH", (32, 8, 6, 16), jax.numpy.dtype("bfloat16")).abstract(mesh)
    assert array.sharding.shard_shape(array.shape) == (32, 2, 6, 16)


def test_memory_that_programs_may_use() -> None:
    mesh = mesh_on(parse("v5e:2x2"), MeshSpec(tensor=4), compilers=False)
    assert memory_limit(parse("v5e:2x2"), mesh) == 15.75 * GIB
    assert memory_limit(parse("h200"), mesh) == 0.75 * CHIPS["h200"].memory
    assert memory_limit(parse("h200"), mesh, fraction=0.5) == 0.5 * CHIPS["h200"].memory
    with pytest.raises(ConfigError, match="--memory-fraction is for GPUs"):
        memory_limit(parse("v5e:2x2"), mesh, fraction=0.5)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_figures_are_of_one_device(chip) -> None:
    """Ridges of published chips lie between 150 and 700 FLOP a byte; nobody gives programs all of
    the memory.
    """
    assert 150 < chip.flops / chip.bandwidth < 700
    assert 0.9 * chip.memory < (chip.usable or 0.95 * chip.memory) <= 1.01 * chip.memory
