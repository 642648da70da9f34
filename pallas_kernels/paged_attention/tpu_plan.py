"""Sizes of the TPU kernel's tiles and blocks, by chip and shape.

Tuned sizes come from tuned/paged_attention_tpu.json.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from jaxserve.pallas_kernels.paged_attention.api import Layout, Options
from jaxserve.pallas_kernels.paged_attention.lanes import Lanes


class Sizes(NamedTuple):
    """Sizes that are tuned; the defaults fit a v4, whose vector memory is the smallest."""

    decode_tokens: int = 512  # largest number of kv positions of a block
    decode_tiles: int = 8  # tiles, of one query token each, in a step of the grid
    chunk_tokens: int = 512  # largest number of kv positions of a block
    # Query rows of a chunk's tile and one kv head; enough to make fetching a page worthwhile.
    query_rows: int = 512


# Bytes of vector memory for two blocks of pages, an upper bound on what the table asks for.
BUFFER_BYTES = 2**22


class Plan(NamedTuple):
    """Constants that the kernel's code depends on, besides the shapes of its operands."""

    options: Options
    lanes: Lanes
    block_pages: int
    per_step: int  # tiles of a step of the grid
    tokens: int  # query tokens of a tile
    heads: int  # kv heads that are walked together
    groups: int  # G: query heads of a kv head; row t * G + g of a tile is token t's
    table_width: int

    @property
    def rows(self) -> int:
        """Return M, the query rows of a tile and kv head."""
        return self.tokens * self.groups

    @property
    def page_size(self) -> int:
        """Return Z, the tokens of a page."""
        return self.options.layout.page_size

    @property
    def block_tokens(self) -> int:
        """Return S, the kv positions of a block."""
        return self.block_pages * self.page_size


def shape_of(layout: Layout, groups: int) -> str:
    """Return the name, in the table, of the shape that sizes are tuned for."""
    return f"K{layout.kv_heads} G{groups} C{Lanes.of(layout).total} {layout.dtype}"


def plan_of(
    options: Options,
    heads: int,
    rows: int,
    num_tokens: int,
    table_width: int,
    sizes: Sizes | None = None,
) -> Plan:
    """Return the plan of a step.

    Args:
        heads: Number N of query heads of the shard.
        rows: Number R of rows.
        num_tokens: Number T of tokens.
        table_width: Width W of the tables.
        sizes: Sizes used in place of the table's, to tune them.
    """
    layout = options.layout
    groups = heads // layout.kv_heads
    sizes = sizes or tuned(options.device_kind, shape_of(layout, groups))
    if options.max_row_tokens == 1:
        tokens = 1
        together = layout.kv_heads
        per_step = sizes.decode_tiles
        block_tokens = sizes.decode_tokens
    else:
        # Every row may end in a tile that is nearly empty, whose queries are copied all the same;
        # so with many rows in a step, tiles are small.
        limit = min(
            sizes.query_rows // groups,
            max(16, 4 * num_tokens // rows),
            options.max_row_tokens or num_tokens,
            num_tokens,
        )
        tokens = max(1, limit)
        together = 1
        per_step = 1
        block_tokens = sizes.chunk_tokens
    pages = _block_pages(layout, together, block_tokens, table_width)
    return Plan(options, Lanes.of(layout), pages, per_step, tokens, together, groups, table_width)


def _block_pages(layout: Layout, heads: int, block_tokens: int, table_width: int) -> int:
    """Return the pages of a block: as many as two blocks have vector memory for."""
    token_bytes = heads * Lanes.of(layout).total * layout.dtype.itemsize
    tokens = min(block_tokens, BUFFER_BYTES // 2 // token_bytes)
    return max(1, min(tokens // layout.page_size, table_width))


def tuned(device_kind: str, shape: str) -> Sizes:
    """Return the table's sizes for this shape on this chip, or the defaults."""
    return Sizes(**_table().get(device_kind, {}).get(shape, {}))


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    """Return the table of tuned sizes: by device kind, then by shape."""
    return json.loads(
        files("jaxserve.pallas_kernels").joinpath("tuned/paged_attention_tpu.json").read_text()
    )["sizes"]
