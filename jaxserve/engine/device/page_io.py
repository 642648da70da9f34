"""Pages read from the devices for other engines, and theirs written: as Piece has them, whatever
kernel and mesh.

In shapes, A are lanes, L the layers of a page group, T the tokens of n pages, and K the kv heads
that the devices hold: copies of the model's own among them (ModelSpec.on), which no piece has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import PIECES_AT_ONCE, page_counts
from jaxserve.engine.device.memory import bytes_per_device
from jaxserve.engine.host.page_pool import NO_PAGE
from jaxserve.engine.kv_segment import Piece
from jaxserve.errors import ConfigError, EngineError
from jaxserve.models.sharded_attention import page_partition
from jaxserve.models.spec import ModelSpec
from pallas_kernels.paged_attention.api import Layout, PagedAttention, Pages, quantize
from sharding.rules import DP_AXES

WIDE = ("float32", "bfloat16")  # what can be narrowed: to what comes later here, and to 8 bits


def sources(stored: str, weights: str) -> tuple[str, ...]:
    """Dtypes of pieces that pages of dtype `stored` can be made of; those of other servers have no
    more digits than the weights.
    """
    narrowed = WIDE[WIDE.index(weights) : WIDE.index(stored) if stored in WIDE else len(WIDE)]
    return (*narrowed, stored)


@dataclass(frozen=True)
class GroupIO:
    """The pages of one page group: how they are read and written, inside what is compiled.

    layout: of one shard's heads. copies: of each of the model's own kv heads. sources: dtypes that
    pieces may have.
    """

    layers: tuple[int, ...]
    layout: Layout
    copies: int
    sources: tuple[str, ...]
    kernel: PagedAttention
    mesh: Mesh

    @property
    def _heads(self) -> str | None:
        """The mesh axis that splits heads."""
        return "tensor" if self.layout.value_dim is None else None

    @property
    def _read_spec(self) -> PartitionSpec:
        return PartitionSpec(DP_AXES, None, None, self._heads)

    @property
    def _piece_spec(self) -> PartitionSpec:
        """Every lane gets all of it."""
        return PartitionSpec(None, None, None, self._heads)

    @property
    def piece_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self._piece_spec)

    @property
    def held_heads(self) -> int:
        """K, of all shards."""
        return self.layout.kv_heads * (self.mesh.shape["tensor"] if self._heads else 1)

    def abstract_piece(self, pages: int, dtype: str) -> Pages:
        """What is uploaded for so many pages, as a lane of what is read: [1, L, T, K, H] of this
        dtype, and scales [1, L, T, K] where it has 8 bits.
        """
        shape = (1, len(self.layers), pages * self.layout.page_size, self.held_heads)
        k = jax.ShapeDtypeStruct(
            (*shape, self.layout.head_dim), jnp.dtype(dtype), sharding=self.piece_sharding
        )
        scale = (
            None
            if dtype in WIDE
            else jax.ShapeDtypeStruct(shape, np.float32, sharding=self.piece_sharding)
        )
        return Pages(k, None, scale, None) if self.layout.value_dim else Pages(k, k, scale, scale)

    def read(self, pages: tuple[Pages, ...], ids: Int[Array, "A n"]) -> Pages:
        """Of every layer, copies of these pages of each lane: [A, L, T, K, H], scales [A, L, T,
        K]."""

        def one_lane(pages: tuple[Pages, ...], ids: jax.Array) -> Pages:
            found = [self.kernel.read(_without_lane(layer), ids[0], self.layout) for layer in pages]
            return jax.tree.map(lambda *layers: jnp.stack(list(map(_flat, layers)))[None], *found)

        specs = (self._partition(pages), PartitionSpec(DP_AXES))
        return jax.shard_map(
            one_lane, mesh=self.mesh, in_specs=specs, out_specs=self._read_spec, check_vma=False
        )(pages, ids)

    def write(
        self, pages: tuple[Pages, ...], ids: Int[Array, "A n"], piece: Pages
    ) -> tuple[Pages, ...]:
        """Its tokens in these pages of each lane, in the pages' dtype; page P drops what is given
        for it.
        """

        def one_lane(pages: tuple[Pages, ...], ids: jax.Array, piece: Pages) -> tuple[Pages, ...]:
            return tuple(self._written(layer, ids[0], i, piece) for i, layer in enumerate(pages))

        held = self._partition(pages)
        specs = (held, PartitionSpec(DP_AXES), self._piece_spec)
        return jax.shard_map(
            one_lane, mesh=self.mesh, in_specs=specs, out_specs=held, check_vma=False
        )(pages, ids, piece)

    def gathered(self, shards: Sequence[jax.Array]) -> jax.Array:
        """One array of a piece: of its shards in the order of their heads, each device gets the one
        that it holds.

        Returns at once. shards: [1, L, T, k, ...] on any devices, k heads as a shard here has them.
        """
        shape = (*shards[0].shape[:3], self.held_heads, *shards[0].shape[4:])
        held = self.piece_sharding.devices_indices_map(shape)
        firsts = [
            (index[3].start or 0) // self.layout.kv_heads // self.copies for index in held.values()
        ]
        placed = jax.device_put([shards[first] for first in firsts], list(held))
        return jax.make_array_from_single_device_arrays(shape, self.piece_sharding, placed)

    def _partition(self, pages: tuple[Pages, ...]) -> tuple[Pages, ...]:
        return tuple(page_partition(self.kernel, self.layout, layer, self.mesh) for layer in pages)

    def _written(self, layer: Pages, ids: Int[Array, "n"], index: int, piece: Pages) -> Pages:
        """A layer's pages of one lane and shard, the lane axis with them."""
        size = self.layout.page_size
        canonical = jax.tree.map(lambda x: x[0, index].reshape(-1, size, *x.shape[3:]), piece)
        written = self.kernel.write_back(
            _without_lane(layer), ids, self._narrowed(canonical), self.layout
        )
        return jax.tree.map(lambda x: x[None], written)

    def _narrowed(self, piece: Pages) -> Pages:
        if not self.layout.scaled:
            return jax.tree.map(lambda x: x.astype(self.layout.dtype), piece)
        if piece.k_scale is not None:
            return piece
        narrow = partial(quantize, dtype=self.layout.dtype)
        (k, k_scale), (v, v_scale) = (
            narrow(piece.k),
            (None, None) if piece.v is None else narrow(piece.v),
        )
        return Pages(k, v, k_scale, v_scale)


def _without_lane(layer: Pages) -> Pages:
    """Inside shard_map, where the lane axis has length 1."""
    return jax.tree.map(lambda x: x[0], layer)


def _flat(x: jax.Array) -> jax.Array:
    """[n, Z, ...] -> [T, ...]"""
    return x.reshape(-1, *x.shape[2:])


@dataclass(frozen=True)
class PagesRead:
    """What was read, still on the devices. shards: of each array, in the order of their heads, [1,
    L, T, k, ...].
    """

    shards: Mapping[str, Sequence[jax.Array]]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.shards.values() for part in parts)

    def start_to_host(self) -> None:
        """So that to_host waits for less. Returns at once."""
        for part in (part for parts in self.shards.values() for part in parts):
            part.copy_to_host_async()

    def to_host(self) -> dict[str, np.ndarray]:
        """The arrays of a Piece, by field; waits for the devices. For any thread."""
        return {
            name: _joined([np.asarray(part)[0] for part in parts])
            for name, parts in self.shards.items()
        }


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2))


class PageIO:
    """Programs that read and write pages, a number of page_counts at once. dtype: of the
    weights."""

    def __init__(
        self,
        spec: ModelSpec,
        config: EngineConfig,
        mesh: Mesh,
        kernel: PagedAttention,
        dtype: jnp.dtype,
    ):
        self._config, self._mesh = config, mesh
        stored = jnp.dtype(config.page_dtype)
        self._groups = [
            GroupIO(
                layers=group.layers,
                layout=group.layout(config.page_size, stored, shards=mesh.shape["tensor"]),
                copies=spec.kv_copies,
                sources=sources(config.page_dtype, str(dtype)),
                kernel=kernel,
                mesh=mesh,
            )
            for group in spec.page_groups()
        ]
        self.programs: dict[str, jax.stages.Compiled] = {}  # by name, what `lowered` gives

    @property
    def most_bytes(self) -> int:
        """That pieces on their way take of one device."""
        if not self._config.page_exchange:
            return 0
        most = page_counts(self._config)[0]
        pieces = [group.abstract_piece(most, group.sources[0]) for group in self._groups]
        return PIECES_AT_ONCE * max(map(bytes_per_device, pieces))

    @property
    def form(self) -> object:
        """Where it is equal, what was read for one engine can be moved to the devices of another
        one of the model.
        """
        return page_counts(self._config), [group.layout for group in self._groups]

    # ---- compiling

    def lowered(self, pages: tuple[Pages, ...]) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """Names and programs: (pages of a group's layers, ids) -> copies, (those, donated, ids,
        piece) -> pages.

        pages: of every layer, abstract.
        """
        for number, group in enumerate(self._groups):
            of_group = self._of(group, pages)
            kept = jax.tree.map(lambda x: x.sharding, of_group)
            read, write = (
                jax.jit(group.read),
                jax.jit(group.write, donate_argnums=0, out_shardings=kept),
            )
            for count in page_counts(self._config):
                shape, lanes = (
                    (self._config.lanes, count),
                    NamedSharding(self._mesh, PartitionSpec(DP_AXES)),
                )
                ids = jax.ShapeDtypeStruct(shape, np.int32, sharding=lanes)
                yield _read_name(number, count), read.lower(of_group, ids)
                for dtype in group.sources:
                    piece = group.abstract_piece(count, dtype)
                    yield _write_name(number, count, dtype), write.lower(of_group, ids, piece)

    def _of(self, group: GroupIO, pages: tuple[Pages, ...]) -> tuple[Pages, ...]:
        return tuple(pages[layer] for layer in group.layers)

    # ---- running

    def read(
        self, pages: tuple[Pages, ...], lane: int, group: int, ids: Sequence[int]
    ) -> PagesRead:
        """Start to read so many pages of a lane as page_counts has; returns at once."""
        io, program = self._groups[group], self.programs[_read_name(group, len(ids))]
        found = program(self._of(io, pages), self._ids(lane, ids, elsewhere=0))
        return PagesRead(
            {
                name: _shards(x, lane, io.copies)
                for name, x in found._asdict().items()
                if x is not None
            }
        )

    def check(self, piece: Piece) -> None:
        """ConfigError where its dtype would have to be widened, EngineError where it is not of this
        model.
        """
        groups = len(self._groups)
        if not 0 <= piece.group < groups:
            raise EngineError(f"a piece of page group {piece.group}; the model has {groups}")
        io, found = self._groups[piece.group], str(piece.k.dtype)
        if found not in io.sources:
            raise ConfigError(
                f"pages of {found} cannot be made pages of {self._config.page_dtype}: keys and "
                f"values are narrowed, "
                "never widened (choose another --kv, here or where they come from)"
            )
        expected = (
            len(io.layers),
            piece.k.shape[1],
            io.held_heads // io.copies,
            io.layout.head_dim,
        )
        if piece.k.shape != expected or (piece.v is None) != (io.layout.value_dim is not None):
            raise EngineError(
                f"a piece of page group {piece.group} has keys {list(piece.k.shape)} and "
                f"{'no ' * (piece.v is None)}values; the model's are {list(expected)}"
            )

    def upload(self, group: int, arrays: Mapping[str, np.ndarray]) -> Pages:
        """The arrays of a piece that was checked, of whole pages, on the devices. For any
        thread."""
        io = self._groups[group]
        spread = {
            name: np.repeat(x, io.copies, axis=2) if io.copies > 1 else x
            for name, x in arrays.items()
        }
        return jax.device_put(
            Pages(**{name: x[None] for name, x in spread.items()}), io.piece_sharding
        )

    def move(self, group: int, read: PagesRead) -> Pages:
        """What was read for an engine of the same form, as if it was uploaded: from device to
        device, without the host.

        Waits for it. For any thread.
        """
        io = self._groups[group]
        return jax.block_until_ready(
            Pages(**{name: io.gathered(shards) for name, shards in read.shards.items()})
        )

    def write(
        self, pages: tuple[Pages, ...], lane: int, group: int, ids: Sequence[int], uploaded: Pages
    ) -> tuple[Pages, ...]:
        """Start to write what was uploaded into these pages of a lane, NO_PAGE for what is dropped.
        `pages` of the group are donated; returns those of every layer.
        """
        io, program = (
            self._groups[group],
            self.programs[_write_name(group, len(ids), str(uploaded.k.dtype))],
        )
        none = self._config.pools[group].pages
        kept = [none if page == NO_PAGE else page for page in ids]
        written = program(self._of(io, pages), self._ids(lane, kept, elsewhere=none), uploaded)
        by_layer = dict(zip(io.layers, written, strict=True))
        return tuple(by_layer.get(layer, old) for layer, old in enumerate(pages))

    def _ids(self, lane: int, ids: Sequence[int], elsewhere: int) -> Int[np.ndarray, "A n"]:
        found = np.full((self._config.lanes, len(ids)), elsewhere, np.int32)
        found[lane] = ids
        return found


def _shards(array: jax.Array, lane: int, copies: int) -> list[jax.Array]:
    """The lane's part of [A, L, T, K, ...], each head once: where heads are copied, every shard has
    one.
    """
    found = {}
    for shard in array.addressable_shards:
        at, head = shard.index[0].start or 0, shard.index[3].start or 0
        if at == lane and head % copies == 0:
            found[head] = shard.data
    return [found[head] for head in sorted(found)]


def _read_name(group: int, pages: int) -> str:
    return f"read {pages} pages of group {group}"


def _write_name(group: int, pages: int, dtype: str) -> str:
    return f"write {pages} pages of group {group} from {dtype}"
