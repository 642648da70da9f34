"""State of an engine on the device between steps: pages, states, and rows, in one donated pytree.

The structure never changes while an engine lives. In shapes, A counts lanes, R the rows of a lane,
and W the entries of a page table.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from jaxserve.config import EngineConfig
from jaxserve.engine.device.sampling import SMALL_FIELDS, LargeRowFields
from jaxserve.errors import EngineError
from jaxserve.models.decoder import Kept
from jaxserve.models.layer_kind import LayerState
from jaxserve.models.sharded_attention import page_rules
from jaxserve.models.sharded_state import LayerStates, axes_of, states_of
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.paged_attention.api import Layout, PagedAttention, Pages
from jaxserve.sampling_params import MAX_BIASES
from jaxserve.sharding.rules import DP_AXES, partition, shards


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Everything the device keeps of the sequences in the rows, but for their pages."""

    tables: tuple[Int[Array, "A R W"], ...]  # per group: those of pages, then that of slots
    length: Int[Array, "A R"]  # positions in pages
    token: Int[Array, "A R"]  # the newest token
    sampling: Int[Array, "A R F"]  # small fields, packed as SMALL_FIELDS
    fields: LargeRowFields


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Pages and states of the layers, rows, token counts of experts, and what a drafter keeps."""

    kept: tuple[Kept, ...]  # per layer, every array with a leading axis A
    rows: Rows
    # Tokens that each of E experts in each of M layers has processed, modulo 2^32.
    load: UInt32[Array, "A M E"] | None = None
    drafter: Any = None  # see device.drafting


class StateHolder:
    """Owner of an engine's current State.

    Every launch donates the state to the device and puts its successor here. All launches of an
    engine go through one holder, since a donated state cannot be used again. For one thread.
    """

    def __init__(self, state: State):
        self._state: State | None = state

    @property
    def current(self) -> State:
        """The state that the next launch takes; EngineError once it was freed."""
        if self._state is None:
            raise EngineError("the engine is closed; make a new one")
        return self._state

    @current.setter
    def current(self, state: State) -> None:
        self._state = state

    def wait(self) -> None:
        """Block until the device has done everything that was launched."""
        jax.block_until_ready(self._state)

    def free(self) -> None:
        """Free the device memory of the state; a second call does nothing."""
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()
        self._state = None


def abstract_state(
    spec: ModelSpec, config: EngineConfig, mesh: Mesh, kernel: PagedAttention
) -> State:
    """Return the state's shapes, dtypes and shardings."""
    lanes_only = NamedSharding(mesh, PartitionSpec(DP_AXES))
    rows = jax.eval_shape(partial(_zero_rows, spec, config))
    dtype = jnp.dtype(config.page_dtype)
    by_layer: dict[int, Kept] = {}
    for group, pool in zip(spec.page_groups(), config.page_pools, strict=True):
        layout = group.layout(config.page_size, dtype, shards=mesh.shape["tensor"])
        by_layer |= dict.fromkeys(group.layers, _abstract_pages(kernel, layout, pool.pages, mesh))
    if spec.state:
        states = _abstract_states(spec.state, config, mesh)
        by_layer |= dict.fromkeys(spec.state_layers, states)
    return State(
        kept=tuple(by_layer[layer] for layer in range(spec.num_layers)),
        rows=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lanes_only), rows
        ),
        load=_abstract_load(spec, config, lanes_only),
    )


def _abstract_load(spec: ModelSpec, config: EngineConfig, lanes_only: NamedSharding) -> Any:
    if spec.mixture is None:
        return None
    shape = (config.lanes, len(spec.mixture.layers), spec.mixture.experts)
    return jax.ShapeDtypeStruct(shape, np.uint32, sharding=lanes_only)


def _abstract_pages(kernel: PagedAttention, layout: Layout, num_pages: int, mesh: Mesh) -> Pages:
    """Return one layer's abstract pool for the whole mesh.

    Args:
        layout: Layout of one shard's heads, which the kernel may pad.
    """

    def whole(x: jax.ShapeDtypeStruct, axes: str) -> jax.ShapeDtypeStruct:
        sizes = (1, *x.shape)
        shape = tuple(
            size * shards(letter, mesh, rules)
            for letter, size in zip("A" + axes, sizes, strict=True)
        )
        split = NamedSharding(mesh, partition("A" + axes, shape, mesh, rules))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=split)

    rules = page_rules(layout)
    one_shard = jax.eval_shape(partial(kernel.allocate, num_pages, layout))
    return jax.tree.map(whole, one_shard, kernel.axes(layout))


def _abstract_states(state: LayerState, config: EngineConfig, mesh: Mesh) -> LayerStates:
    """Return one layer's abstract states for the whole mesh."""

    def whole(x: jax.ShapeDtypeStruct, axes: str) -> jax.ShapeDtypeStruct:
        shape = (config.lanes, *x.shape)
        split = NamedSharding(mesh, partition("A" + axes, shape, mesh))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=split)

    states = states_of(state, config.slots)
    return jax.tree.map(whole, states, axes_of(states))


def new_state(abstract: State) -> State:
    """Make a state of zeros on the devices."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)

    def zeros() -> State:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)

    return jax.jit(zeros, out_shardings=shardings)()


def _zero_rows(spec: ModelSpec, config: EngineConfig) -> Rows:
    """Make empty rows; also traced alone, for the shapes."""

    def field(*shape: int, dtype: type = np.int32) -> jax.Array:
        return jnp.zeros((config.lanes, config.max_batch, *shape), dtype)

    return Rows(
        tables=tuple(field(config.pages_per_row) for _ in config.pools),
        length=field(),
        token=field(),
        sampling=field(SMALL_FIELDS.size),
        fields=LargeRowFields(
            counts=field(spec.vocab_size),
            bias_ids=field(MAX_BIASES),
            bias_values=field(MAX_BIASES, dtype=np.float32),
            mask=field(1 + config.draft_tokens, -(-spec.vocab_size // 32), dtype=np.uint32),
        ),
    )
