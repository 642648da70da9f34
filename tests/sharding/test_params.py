"""Declarations of parameters, and the random arrays that follow from them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.engine.device.compile_counter import CompileCounter
from jaxserve.sharding import params
from jaxserve.sharding.errors import ShardingError
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import ParamSpec, is_param_spec, map_specs, random_params

EXPERTS = ParamSpec("EDF", (4, 64, 32), jnp.dtype(jnp.bfloat16))
NORM = ParamSpec("D", (64,), jnp.dtype(jnp.float32), mean=1.0, std=0.0)
EMBED = ParamSpec("VD", (512, 64), jnp.dtype(jnp.float32), mean=0.5, std=0.1)
SPECS = {"embed": EMBED, "layers": [{"up": EXPERTS, "norm": NORM}, {"up": EXPERTS, "norm": NORM}]}


def test_bytes() -> None:
    assert EXPERTS.nbytes == 4 * 64 * 32 * 2 and NORM.nbytes == 256
    assert ParamSpec("", (), jnp.dtype(jnp.int8)).nbytes == 1


def test_abstract_has_shape_dtype_and_sharding() -> None:
    mesh = MeshSpec(expert=2, tensor=4).build(jax.devices())
    abstract = EXPERTS.abstract(mesh)
    assert (abstract.shape, abstract.dtype) == ((4, 64, 32), jnp.bfloat16)
    assert (
        abstract.sharding
        == NamedSharding(mesh, PartitionSpec("expert", None, "tensor"))
        == EXPERTS.sharding(mesh)
    )


def test_map_specs_keeps_the_structure() -> None:
    sizes = map_specs(lambda spec: spec.nbytes, SPECS)
    assert sizes == {"embed": 131072, "layers": [{"up": 16384, "norm": 256}] * 2}
    assert is_param_spec(NORM) and not is_param_spec(SPECS)


def test_random_params_are_sharded_as_declared_and_spread_as_declared() -> None:
    mesh = MeshSpec(expert=2, tensor=4).build(jax.devices())
    drawn = random_params(SPECS, mesh)
    for spec, array in zip(
        jax.tree.leaves(SPECS, is_leaf=is_param_spec), jax.tree.leaves(drawn), strict=True
    ):
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype)
        assert array.sharding == spec.sharding(mesh)
    assert {shard.data.shape for shard in drawn["layers"][0]["up"].addressable_shards} == {
        (2, 64, 8)
    }
    embed = np.asarray(drawn["embed"])
    assert abs(embed.mean() - 0.5) < 0.003 and abs(embed.std() - 0.1) < 0.003
    np.testing.assert_array_equal(drawn["layers"][1]["norm"], np.ones(64, np.float32))


def test_random_params_depend_on_seed_and_leaf_but_not_on_the_mesh() -> None:
    def drawn(mesh: MeshSpec, seed: int) -> list[np.ndarray]:
        leaves = jax.tree.leaves(random_params(SPECS, mesh.build(jax.devices()), seed))
        return [np.asarray(leaf.astype(jnp.float32)) for leaf in leaves]

    one = drawn(MeshSpec(), 3)
    eight = drawn(MeshSpec(expert=2, tensor=4), 3)
    other = drawn(MeshSpec(), 4)
    for a, b in zip(one, eight, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    embed, _, first, _, second = one
    assert np.abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05
    assert np.abs(np.corrcoef(embed.ravel(), other[0].ravel())[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("axes", "order"),
    [
        ("DKQH", (1, 2, 0, 3)),
        ("DCF", (1, 0, 2)),
        ("EDF", (0, 1, 2)),
        ("DV", (0, 1)),
        ("NHD", (0, 1, 2)),
        ("D", (0,)),
    ],
)
def test_the_contracted_axis_lies_next_to_the_last(axes: str, order: tuple[int, ...]) -> None:
    assert params.memory_order(axes) == order


def test_weights_lie_in_memory_as_their_platform_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = MeshSpec(tensor=2).build(jax.devices())
    spec = ParamSpec("DCF", (4, 2, 6), jnp.dtype(jnp.float32), std=1.0)
    plain = random_params([spec], mesh)[0]
    monkeypatch.setattr(params, "REORDERED", {"cpu"})
    reordered = random_params([spec], mesh)[0]
    assert plain.format.layout.major_to_minor == (0, 1, 2)
    assert (
        reordered.format.layout.major_to_minor
        == (1, 0, 2)
        == spec.abstract(mesh).format.layout.major_to_minor
    )
    assert reordered.sharding == plain.sharding
    np.testing.assert_array_equal(reordered, plain)


def test_layers_of_one_shape_share_a_compile() -> None:
    mesh = MeshSpec().build(jax.devices())
    layer = {"up": replace(EXPERTS, std=0.03)}
    counts = []
    for layers in (4, 24):
        counter = CompileCounter()
        before = counter.here.total
        random_params([layer] * layers, mesh)
        counter.close()
        counts.append(counter.here.total - before)
    assert counts[0] == counts[1] > 0


def test_random_params_of_a_size_that_does_not_divide() -> None:
    with pytest.raises(
        ShardingError,
        match=r"axis F \(mlp\) of size 30 does not divide by mesh axis 'tensor' of size 4",
    ):
        random_params(
            {"w": ParamSpec("DF", (4, 30), jnp.dtype(jnp.float32))},
            MeshSpec(tensor=4).build(jax.devices()),
        )


def test_numbers_that_are_summed_up_lie_beside_each_other_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = MeshSpec(tensor=2).build(jax.devices())
    spec = ParamSpec("NHD", (4, 2, 6), jnp.dtype(jnp.int4), std=2.0, summed="NH")
    plain = random_params([spec], mesh)[0]
    monkeypatch.setattr(params, "SUMMED_LAST", {"cpu"})
    reordered = random_params([spec], mesh)[0]
    assert plain.format.layout.major_to_minor == (0, 1, 2)
    assert (
        reordered.format.layout.major_to_minor
        == (2, 0, 1)
        == spec.abstract(mesh).format.layout.major_to_minor
    )
    np.testing.assert_array_equal(reordered, plain)
