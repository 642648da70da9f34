"""Compiled reads and writes of recurrent states that travel between engines, beside page_io.py.

In shapes, A counts lanes, L the layers with a state, n states, K the heads of a state, and H the
numbers of one head.
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int

from jaxserve.models.layer_kind import LayerState
from jaxserve.models.sharded_state import LayerStates, axes_of, state_partition, states_of
from jaxserve.pallas_kernels.paged_attention.api import Pages
from jaxserve.sharding.rules import DP_AXES

DTYPE = "float32"


@dataclass(frozen=True)
class StateGroupIO:
    """Traced reads and writes of the slots of the layers that have a state.

    Members are those of page_io.PageGroupIO. A segment is a `Pages` of K alone: all numbers of a
    state, head by head.
    """

    layers: tuple[int, ...]
    state: LayerState
    mesh: Mesh
    copies: int = 1
    accepted: tuple[str, ...] = (DTYPE,)
    keeps_values: bool = False

    @property
    def segment_sharding(self) -> NamedSharding:
        # Every lane gets all of a segment; all but the one that it is for drop it.
        return NamedSharding(self.mesh, PartitionSpec(None, None, None, "tensor"))

    @property
    def held_heads(self) -> int:
        """Number of heads on all shards."""
        return self.state.sizes()["k"]

    @property
    def shard_heads(self) -> int:
        """Number of heads on one shard."""
        return self.held_heads // self.mesh.shape["tensor"]

    @property
    def numbers(self) -> int:
        """Numbers H of one head."""
        one = states_of(self.state, 1)
        return sum(prod(leaf.shape) for leaf in jax.tree.leaves(one)) // self.held_heads

    @property
    def transfer_format(self) -> object:
        """A value that is equal where the devices of two engines hold states alike."""
        return self.state, self.shard_heads

    def counts(self, of_pages: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of states that are read or written at once: one, of a prompt's end."""
        return (1,)

    def abstract_segment(self, count: int, dtype: str) -> Pages:
        """Describe what is uploaded for `count` states: [1, L, n, K, H] float32."""
        shape = (1, len(self.layers), count, self.held_heads, self.numbers)
        k = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=self.segment_sharding)
        return Pages(k, None)

    def read(self, states: tuple[LayerStates, ...], ids: Int[Array, "A n"]) -> Pages:
        """Copy these slots of each lane, of all layers: [A, L, n, K, H]."""

        def one_lane(states: tuple[LayerStates, ...], ids: jax.Array) -> Pages:
            found = [_numbers(jax.tree.map(lambda x: x[0][ids[0]], layer)) for layer in states]
            return Pages(jnp.stack(found)[None], None)

        specs = (self._partition(states), PartitionSpec(DP_AXES))
        read_spec = PartitionSpec(DP_AXES, None, None, "tensor")
        return jax.shard_map(
            one_lane, mesh=self.mesh, in_specs=specs, out_specs=read_spec, check_vma=False
        )(states, ids)

    def write(
        self, states: tuple[LayerStates, ...], ids: Int[Array, "A n"], segment: Pages
    ) -> tuple[LayerStates, ...]:
        """Write a segment's states into these slots of each lane.

        What is meant for slot S, the number of slots, is dropped.
        """

        def one_lane(
            states: tuple[LayerStates, ...], ids: jax.Array, segment: Pages
        ) -> tuple[LayerStates, ...]:
            return tuple(
                _with_numbers(layer, ids[0], segment.k[0, i]) for i, layer in enumerate(states)
            )

        held = self._partition(states)
        specs = (held, PartitionSpec(DP_AXES), self.segment_sharding.spec)
        return jax.shard_map(
            one_lane, mesh=self.mesh, in_specs=specs, out_specs=held, check_vma=False
        )(states, ids, segment)

    def _partition(self, states: tuple[LayerStates, ...]) -> tuple[LayerStates, ...]:
        return tuple(state_partition(layer, self.mesh) for layer in states)


def _numbers(states: LayerStates) -> Float32[Array, "n K H"]:
    """Return all numbers of each state, head by head."""

    def by_head(x: jax.Array, letters: str) -> jax.Array:
        moved = jnp.moveaxis(x, letters.index("k"), 1)
        return moved.reshape(*moved.shape[:2], -1)

    return jnp.concatenate(jax.tree.leaves(jax.tree.map(by_head, states, axes_of(states))), -1)


def _with_numbers(
    states: LayerStates, ids: Int[Array, "n"], numbers: Float32[Array, "n K H"]
) -> LayerStates:
    """Return the slots of one lane, which have a leading axis A, with these numbers in some."""
    begin = 0
    written = list[jax.Array]()
    leaves, structure = jax.tree.flatten(states)
    for x, letters in zip(leaves, jax.tree.leaves(axes_of(states)), strict=True):
        at = letters.index("k")
        shape = jnp.moveaxis(x[0], at, 1).shape[1:]
        count = prod(shape[1:])
        own = numbers[..., begin : begin + count].reshape(-1, *shape)
        written.append(x.at[0, ids].set(jnp.moveaxis(own, 1, at), mode="drop"))
        begin += count
    return jax.tree.unflatten(structure, written)
