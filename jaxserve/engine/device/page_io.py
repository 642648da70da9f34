"""Compiled programs of KV transfer, which read pages and write pages of other engines.

They translate between the pages of this engine's kernel and mesh, and KV segments (kv_segment.py),
which look the same in every engine. PageStore (page_store.py) runs them.

In shapes, A counts lanes, L the layers of a page group, T the tokens of n pages, and K the kv heads
that the devices hold: copies of the model's own among them (ModelSpec.on), which no segment has.
The slots of layers with a state are a group as well (state_io.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import SEGMENTS_ON_DEVICE, page_counts
from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.engine.device.state_io import StateGroupIO
from jaxserve.models.decoder import Kept
from jaxserve.models.sharded_attention import page_partition
from jaxserve.models.spec import ModelSpec
from jaxserve.pallas_kernels.paged_attention.api import Layout, PagedAttention, Pages, quantize
from jaxserve.sharding.rules import DP_AXES

# Dtypes that can be narrowed: to a later one of these, or to one whose numbers carry scales.
WIDE = ("float32", "bfloat16")


def accepted_dtypes(page_dtype: str, weights: str) -> tuple[str, ...]:
    """List the dtypes of KV segments that can become pages of this dtype, the widest first.

    No server of the model holds keys and values with more digits than its weights have.
    """
    first = WIDE.index(weights)
    end = WIDE.index(page_dtype) if page_dtype in WIDE else len(WIDE)
    return (*WIDE[first:end], page_dtype)


@dataclass(frozen=True)
class PageGroupIO:
    """Traced reads and writes of the pages of one page group."""

    layers: tuple[int, ...]
    layout: Layout  # of one shard's heads
    copies: int  # of each of the model's own kv heads
    accepted: tuple[str, ...]  # see accepted_dtypes
    kernel: PagedAttention
    mesh: Mesh

    @property
    def _heads(self) -> str | None:
        """The mesh axis that splits heads; None for pages of K alone, which every shard holds."""
        return "tensor" if self.layout.keeps_values else None

    @property
    def segment_sharding(self) -> NamedSharding:
        # Every lane gets all of a segment; all but the one that it is for drop it.
        return NamedSharding(self.mesh, PartitionSpec(None, None, None, self._heads))

    @property
    def held_heads(self) -> int:
        """Number of kv heads on all shards, copies included."""
        return self.layout.kv_heads * (self.mesh.shape["tensor"] if self._heads else 1)

    @property
    def shard_heads(self) -> int:
        """Number of kv heads on one shard."""
        return self.layout.kv_heads

    @property
    def numbers(self) -> int:
        """Numbers H of a key."""
        return self.layout.head_dim

    @property
    def keeps_values(self) -> bool:
        """True if segments have values beside their keys."""
        return self.layout.keeps_values

    @property
    def transfer_format(self) -> object:
        """A value that is equal where the devices of two engines hold pages alike."""
        return self.layout

    def counts(self, of_pages: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of entries that are read or written at once, see page_counts."""
        return of_pages

    def abstract_segment(self, pages: int, dtype: str) -> Pages:
        """Describe what is uploaded for `pages` pages: [1, L, T, K, H] of this dtype.

        A dtype whose numbers carry scales has float32 scales [1, L, T, K] as well.
        """

        def array(*shape: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.segment_sharding)

        shape = (1, len(self.layers), pages * self.layout.page_size, self.held_heads)
        k = array(*shape, self.layout.head_dim, dtype=jnp.dtype(dtype))
        scale = None if dtype in WIDE else array(*shape, dtype=jnp.dtype(np.float32))
        return Pages(k, k, scale, scale) if self.layout.keeps_values else Pages(k, None, scale)

    def read(self, pages: tuple[Pages, ...], ids: Int[Array, "A n"]) -> Pages:
        """Copy these pages of each lane, of all layers: [A, L, T, K, H], scales [A, L, T, K]."""

        def one_lane(pages: tuple[Pages, ...], ids: jax.Array) -> Pages:
            found = [self.kernel.read(_without_lane(layer), ids[0], self.layout) for layer in pages]
            return jax.tree.map(_stack_layers, *found)

        specs = (self._partition(pages), PartitionSpec(DP_AXES))
        read_spec = PartitionSpec(DP_AXES, None, None, self._heads)
        return jax.shard_map(
            one_lane, mesh=self.mesh, in_specs=specs, out_specs=read_spec, check_vma=False
        )(pages, ids)

    def write(
        self, pages: tuple[Pages, ...], ids: Int[Array, "A n"], segment: Pages
    ) -> tuple[Pages, ...]:
        """Write a segment's tokens into these pages of each lane, in the pages' dtype.

        What is meant for page P, the number of pages, is dropped.
        """

        def one_lane(pages: tuple[Pages, ...], ids: jax.Array, segment: Pages) -> tuple[Pages, ...]:
            return tuple(
                self._write_layer(layer, ids[0], i, segment) for i, layer in enumerate(pages)
            )

        held = self._partition(pages)
        specs = (held, PartitionSpec(DP_AXES), self.segment_sharding.spec)
        return jax.shard_map(
            one_lane, mesh=self.mesh, in_specs=specs, out_specs=held, check_vma=False
        )(pages, ids, segment)

    def _partition(self, pages: tuple[Pages, ...]) -> tuple[Pages, ...]:
        return tuple(page_partition(self.kernel, self.layout, layer, self.mesh) for layer in pages)

    def _write_layer(self, layer: Pages, ids: Int[Array, "n"], index: int, segment: Pages) -> Pages:
        """Return the pages of one layer, lane and shard, with the lane axis."""
        size = self.layout.page_size
        canonical = jax.tree.map(lambda x: x[0, index].reshape(-1, size, *x.shape[3:]), segment)
        written = self.kernel.write_back(
            _without_lane(layer), ids, self._to_page_dtype(canonical), self.layout
        )
        return jax.tree.map(lambda x: x[None], written)

    def _to_page_dtype(self, segment: Pages) -> Pages:
        """Narrow keys and values as a step narrows them before it stores them."""
        if not self.layout.scaled:
            return jax.tree.map(lambda x: x.astype(self.layout.dtype), segment)
        if segment.k_scale is not None:
            return segment  # narrowed already
        k, k_scale = quantize(segment.k, self.layout.dtype)
        if not self.layout.keeps_values:
            return Pages(k, None, k_scale)
        v, v_scale = quantize(segment.v, self.layout.dtype)
        return Pages(k, v, k_scale, v_scale)


def _without_lane(layer: Pages) -> Pages:
    """Drop the lane axis, which has length 1 inside shard_map."""
    return jax.tree.map(lambda x: x[0], layer)


def _stack_layers(*layers: jax.Array) -> jax.Array:
    """Join pages [n, Z, ...] of every layer into [1, L, n * Z, ...]."""
    return jnp.stack([x.reshape(-1, *x.shape[2:]) for x in layers])[None]


GroupIO = PageGroupIO | StateGroupIO


class PageIO:
    """Programs of KV transfer, lowered for each number of pages that is read or written at once.

    Args:
        dtype: Dtype of the weights.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: EngineConfig,
        mesh: Mesh,
        kernel: PagedAttention,
        dtype: jnp.dtype,
    ):
        self._config = config
        self._mesh = mesh
        page_dtype = jnp.dtype(config.page_dtype)
        self.groups: list[GroupIO] = [
            PageGroupIO(
                layers=group.layers,
                layout=group.layout(config.page_size, page_dtype, shards=mesh.shape["tensor"]),
                copies=group.copies,
                accepted=accepted_dtypes(config.page_dtype, str(dtype)),
                kernel=kernel,
                mesh=mesh,
            )
            for group in spec.page_groups()
        ]
        if spec.state:
            self.groups.append(StateGroupIO(spec.state_layers, spec.state, mesh))

    @property
    def transit_bytes(self) -> int:
        """Bytes of one device that KV segments in transit take at most."""
        if not self._config.page_exchange:
            return 0
        counts = page_counts(self._config)
        segments = [
            group.abstract_segment(group.counts(counts)[0], group.accepted[0])
            for group in self.groups
        ]
        return SEGMENTS_ON_DEVICE * max(map(bytes_per_device, segments))

    @property
    def transfer_format(self) -> object:
        """A value that is equal for engines of one model that can move pages device to device."""
        return page_counts(self._config), [group.transfer_format for group in self.groups]

    def lower(self, kept: tuple[Kept, ...]) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """Yield names and programs for the abstract pages of every layer, which `kept` has.

        A read is (pages of a group's layers, ids) -> copies; a write, which donates its pages, is
        (pages of a group's layers, ids, segment) -> pages.
        """
        lanes = NamedSharding(self._mesh, PartitionSpec(DP_AXES))
        for number, group in enumerate(self.groups):
            group_pages: Any = pages_of_group(group, kept)
            shardings = jax.tree.map(lambda x: x.sharding, group_pages)
            read = jax.jit(group.read)
            write = jax.jit(group.write, donate_argnums=0, out_shardings=shardings)
            for count in group.counts(page_counts(self._config)):
                ids = jax.ShapeDtypeStruct((self._config.lanes, count), np.int32, sharding=lanes)
                yield read_name(number, count), read.lower(group_pages, ids)
                for dtype in group.accepted:
                    segment = group.abstract_segment(count, dtype)
                    yield write_name(number, count, dtype), write.lower(group_pages, ids, segment)


def pages_of_group(group: GroupIO, kept: tuple[Kept, ...]) -> tuple[Kept, ...]:
    """Return the pages of the group's layers, or their states."""
    return tuple(kept[layer] for layer in group.layers)


def read_name(group: int, pages: int) -> str:
    return f"read {pages} pages of group {group}"


def write_name(group: int, pages: int, dtype: str) -> str:
    return f"write {pages} pages of group {group} from {dtype}"
