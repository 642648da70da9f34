"""How large the TPU kernel's tiles and blocks are, by chip and shape: from
tuned/paged_attention_tpu.json.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from pallas_kernels.paged_attention.api import Layout, Options
from pallas_kernels.paged_attention.lanes import Lanes


class Sizes(NamedTuple):
    """What may be tuned. The defaults fit a v4, whose vector memory is the smallest.

    decode_tokens, chunk_tokens: kv positions of a block, at most. decode_tiles: per step of the
    grid, one query each. query_rows: of a chunk's tile and one kv head; a page that was fetched has
    to be worth it.
    """

    decode_tokens: int = 512
    decode_tiles: int = 8
    chunk_tokens: int = 512
    query_rows: int = 512


BUFFER_BYTES = 2**22  # of vector memory for two blocks of pages, whatever the table says


class Plan(NamedTuple):
    """What the kernel's code depends on beside its operands' shapes."""

    options: Options
    lanes: Lanes
    block_pages: int
    per_step: int  # tiles per step of the grid
    tokens: int  # of a tile
    heads: int  # kv heads that are walked together
    groups: int  # G: query heads of a kv head; of a tile's rows, t * G + g is token t's
    table_width: int

    @property
    def rows(self) -> int:
        """M: queries of a tile and kv head."""
        return self.tokens * self.groups

    @property
    def page_size(self) -> int:
        return self.options.layout.page_size

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.page_size


def shape_of(layout: Layout, groups: int) -> str:
    """A name for what the sizes depend on."""
    return f"K{layout.kv_heads} G{groups} C{Lanes.of(layout).total} {layout.dtype}"


def plan_of(
    options: Options,
    heads: int,
    rows: int,
    num_tokens: int,
    table_width: int,
    sizes: Sizes | None = None,
) -> Plan:
    """heads: N of the shard. rows: R. num_tokens: T. sizes: instead of the table's."""
    layout = options.layout
    groups = heads // layout.kv_heads
    sizes = sizes or tuned(options.device_kind, shape_of(layout, groups))
    if options.max_row_tokens == 1:
        tokens = 1
        together = layout.kv_heads
        per_step = sizes.decode_tiles
        block_tokens = sizes.decode_tokens
    else:
        # Every row may end in a tile that is nearly empty, whose queries are brought all the same.
        most = min(
            sizes.query_rows // groups,
            max(16, 4 * num_tokens // rows),
            options.max_row_tokens or num_tokens,
            num_tokens,
        )
        tokens = max(1, most)
        together = 1
        per_step = 1
        block_tokens = sizes.chunk_tokens
    pages = _block_pages(layout, together, block_tokens, table_width)
    return Plan(options, Lanes.of(layout), pages, per_step, tokens, together, groups, table_width)


def _block_pages(layout: Layout, heads: int, block_tokens: int, table_width: int) -> int:
    token_bytes = heads * Lanes.of(layout).total * layout.dtype.itemsize
    tokens = min(block_tokens, BUFFER_BYTES // 2 // token_bytes)
    return max(1, min(tokens // layout.page_size, table_width))


def tuned(device_kind: str, shape: str) -> Sizes:
    """The table's sizes for this shape on this chip, or the defaults."""
    return Sizes(**_table().get(device_kind, {}).get(shape, {}))


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    return json.loads(
        files("pallas_kernels").joinpath("tuned/paged_attention_tpu.json").read_text()
    )["sizes"]
