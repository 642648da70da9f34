"""Page access for KV transfer: pages leave an engine's devices, and pages of other engines come in.

In shapes, A counts lanes, L the layers of a page group, T the tokens of n pages, and K the kv heads
that the devices hold, see page_io.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jaxtyping import Int

from jaxserve.config import EngineConfig
from jaxserve.config.kv_policy import NO_PAGE
from jaxserve.engine.device.page_io import (
    GroupIO,
    PageIO,
    pages_of_group,
    read_name,
    write_name,
)
from jaxserve.engine.device.state import StateHolder
from jaxserve.engine.device.state_io import StateGroupIO
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import ConfigError, EngineError
from jaxserve.pallas_kernels.paged_attention.api import Pages


@dataclass(frozen=True)
class PagesRead:
    """Pages that were read, still on the devices."""

    # Of each array of a KV segment, in the order of their heads, [1, L, T, k, ...].
    shards: Mapping[str, Sequence[jax.Array]]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.shards.values() for part in parts)

    def start_to_host(self) -> None:
        """Start the copies that to_host waits for, and return at once."""
        for parts in self.shards.values():
            for part in parts:
                part.copy_to_host_async()

    def to_host(self) -> dict[str, np.ndarray]:
        """Return the arrays of a KV segment, by field; waits for the devices. For any thread."""
        return {
            name: _join_heads([np.asarray(part)[0] for part in parts])
            for name, parts in self.shards.items()
        }


def _join_heads(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2))


class PageStore:
    """Reader and writer of an engine's pages; implements engine.host.page_device.PageDevice.

    Args:
        programs: Compiled programs of `io` by name, which may be filled in until the first call.
    """

    def __init__(
        self,
        config: EngineConfig,
        io: PageIO,
        programs: Mapping[str, jax.stages.Compiled],
        state: StateHolder,
    ):
        self._config = config
        self._io = io
        self._programs = programs
        self._state = state

    @property
    def transfer_format(self) -> object:
        """A value that is equal where `move_pages` can bring pages from one store to another."""
        return self._io.transfer_format

    def read_pages(self, lane: int, group: int, ids: Sequence[int]) -> PagesRead:
        """Start to copy pages of a page group to buffers on the devices; returns at once.

        Their number is one of `buckets.page_counts`, of slots 1. Later steps do not change what was
        read.
        """
        state = self._state.current
        io = self._io.groups[group]
        program = self._programs[read_name(group, len(ids))]
        # The program reads in all lanes. What it reads in others, page 0, is not used.
        found = program(pages_of_group(io, state.kept), self._ids(lane, ids, elsewhere=0))
        arrays = {name: x for name, x in found._asdict().items() if x is not None}
        return PagesRead({name: _shards_of_lane(x, lane, io.copies) for name, x in arrays.items()})

    def check_segment(self, segment: KVSegment) -> None:
        """Raise an error if a KV segment cannot become pages here. For any thread.

        ConfigError where pages are not made from its dtype (see `page_io.accepted_dtypes`),
        EngineError where it is not of this model.
        """
        groups = len(self._io.groups)
        if not 0 <= segment.group < groups:
            raise EngineError(f"a KV segment of page group {segment.group}; the model has {groups}")
        io = self._io.groups[segment.group]
        dtype = str(segment.k.dtype)
        if dtype not in io.accepted:
            raise ConfigError(
                f"pages of {dtype} cannot be made pages of {self._config.page_dtype}, which are "
                f"made from {' or '.join(io.accepted)} (choose the same --kv on both servers)"
            )
        heads = io.held_heads // io.copies
        tokens = 1 if isinstance(io, StateGroupIO) else segment.k.shape[1]
        expected = (len(io.layers), tokens, heads, io.numbers)
        values = None if segment.v is None else segment.v.shape
        expected_values = expected if io.keeps_values else None
        if (segment.k.shape, values) != (expected, expected_values):
            raise EngineError(
                f"a KV segment of page group {segment.group} has keys {list(segment.k.shape)} and "
                f"{_listed(values)}; the model's are {list(expected)} and "
                f"{_listed(expected_values)}"
            )

    def upload_pages(self, group: int, arrays: Mapping[str, np.ndarray]) -> Pages:
        """Bring the arrays of a checked KV segment to the devices. For any thread.

        They hold whole pages, whose number is one of `buckets.page_counts`, or one state.
        """
        io = self._io.groups[group]
        uploaded = {
            name: (np.repeat(x, io.copies, axis=2) if io.copies > 1 else x)[None]
            for name, x in arrays.items()
        }
        return jax.device_put(Pages(**uploaded), io.segment_sharding)

    def move_pages(self, group: int, read: PagesRead) -> Pages:
        """Bring what another engine read to these devices, without the host, and wait for it.

        The other engine's pages have the same transfer_format. The result is that of upload_pages.
        For any thread.
        """
        io = self._io.groups[group]
        moved = {name: _move_shards(io, shards) for name, shards in read.shards.items()}
        return jax.block_until_ready(Pages(**moved))

    def write_pages(self, lane: int, group: int, ids: Sequence[int], uploaded: Pages) -> None:
        """Write what was uploaded into these pages, before any step that is launched later.

        A page whose id is NO_PAGE is not written.
        """
        state = self._state.current
        io = self._io.groups[group]
        program = self._programs[write_name(group, len(ids), str(uploaded.k.dtype))]
        # An id out of range, such as the number of pages, makes the compiled write drop the page.
        dropped = self._config.pools[group].pages
        numbers = [dropped if page == NO_PAGE else page for page in ids]
        written = program(
            pages_of_group(io, state.kept), self._ids(lane, numbers, elsewhere=dropped), uploaded
        )
        by_layer = dict(zip(io.layers, written, strict=True))
        kept = tuple(by_layer.get(layer, old) for layer, old in enumerate(state.kept))
        self._state.current = replace(state, kept=kept)

    def _ids(self, lane: int, ids: Sequence[int], elsewhere: int) -> Int[np.ndarray, "A n"]:
        """Return these ids for one lane, and `elsewhere` for all others."""
        found = np.full((self._config.lanes, len(ids)), elsewhere, np.int32)
        found[lane] = ids
        return found


def _listed(shape: tuple[int, ...] | None) -> str:
    return "no values" if shape is None else f"values {list(shape)}"


def _shards_of_lane(array: jax.Array, lane: int, copies: int) -> list[jax.Array]:
    """Return the lane's shards of [A, L, T, K, ...], in the order of their heads.

    Each head comes once: where heads are copied, a shard holds one head.
    """
    found = {}
    for shard in array.addressable_shards:
        shard_lane = shard.index[0].start or 0
        head = shard.index[3].start or 0
        if shard_lane == lane and head % copies == 0:
            found[head] = shard.data
    return [found[head] for head in sorted(found)]


def _move_shards(io: GroupIO, shards: Sequence[jax.Array]) -> jax.Array:
    """Start to copy each shard to the devices that hold its heads; returns at once.

    Args:
        shards: Shards of one array, [1, L, T, k, ...] on any devices, in the order of their heads.
            k is the number of heads of a shard here.
    """
    shape = (*shards[0].shape[:3], io.held_heads, *shards[0].shape[4:])
    sharding = io.segment_sharding
    by_device = sharding.devices_indices_map(shape)
    sources = [
        shards[(index[3].start or 0) // io.shard_heads // io.copies] for index in by_device.values()
    ]
    placed = jax.device_put(sources, list(by_device))
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)
