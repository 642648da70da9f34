"""Tests of the state's shapes, which are those of a kernel's own layout on each shard."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import resolve
from jaxserve.engine.device.memory import bytes_per_device, cache_bytes
from jaxserve.engine.device.state import abstract_state
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.api import Layout, Pages
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.tiny import BASE, SPEC

FLOAT = jnp.dtype("float32")


def allocate_padded(num_pages: int, layout: Layout) -> Pages:
    """Allocate heads in sets of eight, with K and V in one array."""
    heads = -(-2 * layout.kv_heads // 8) * 8
    return Pages(jnp.zeros((num_pages, layout.page_size, heads, layout.head_dim), layout.dtype))


PADDED = SimpleNamespace(allocate=allocate_padded, axes=lambda layout: Pages("PZKH"))


@pytest.mark.parametrize("kernel", [reference, PADDED], ids=["reference", "padded"])
@pytest.mark.parametrize(
    "mesh_spec", [MeshSpec(), MeshSpec(tensor=2), MeshSpec(data=2, tensor=2)], ids=str
)
def test_every_shard_has_what_the_implementation_allocates(kernel, mesh_spec: MeshSpec) -> None:
    mesh = mesh_spec.build(jax.devices())
    config = resolve(BASE, max_positions=96, lanes=mesh_spec.data, affordable_tokens=0)
    state = abstract_state(SPEC, config, mesh, kernel)
    layout = Layout(SPEC.num_kv_heads // mesh_spec.tensor, SPEC.head_dim, config.page_size, FLOAT)
    one = jax.eval_shape(lambda: kernel.allocate(config.pools[0].pages, layout))
    for pages in state.kept:
        shards = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), pages)
        assert jax.tree.leaves(shards) == jax.tree.leaves(
            jax.tree.map(lambda x: (1, *x.shape), one)
        )
    assert bytes_per_device(state.kept) == cache_bytes(SPEC, config, kernel, mesh_spec.tensor)
