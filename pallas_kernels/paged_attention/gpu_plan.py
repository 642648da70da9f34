"""Sizes of the Hopper kernel's tiles, blocks and buffers, by chip and shape.

Tuned sizes come from tuned/paged_attention_gpu.json.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import gcd
from typing import NamedTuple

from jaxserve.pallas_kernels.hopper import (
    ALIGNMENT,
    FEW_CORES,
    SHARED_BYTES,
    WARPGROUP_ROWS,
    cores_of,
)
from jaxserve.pallas_kernels.paged_attention.api import KernelError, Layout, Options

# Columns of a part's result that are written together: there is no shared memory for all of them.
RESULT_COLUMNS = 64
LEAST_BLOCK = 64  # kv positions of the smallest block
# The largest number of result rows of all parts of a step. The results of parts are written to
# global memory and read back whole, so too many parts cost more than they gain.
PARTIAL_ROWS = 2**16
ELEMENT = 2  # bytes of a bfloat16


class Sizes(NamedTuple):
    """Sizes that are tuned, for one kind of walk."""

    warpgroups: int  # those that multiply, 64 query rows each
    block_tokens: int  # kv positions of a block, a multiple of 64
    per_core: int  # largest number of thread blocks that share a multiprocessor
    split_tokens: int  # smallest number of kv positions of a part, where rows are split
    splits: int  # largest number of parts of a row


# Warpgroups that share the rows of a latent tile and have half of a value's columns each: the
# result of all columns would fill all registers of one.
LATENT_WARPGROUPS = 2
# Defaults for tiles that fit into one warpgroup's product, and for tiles of several warpgroups.
FEW = Sizes(warpgroups=1, block_tokens=64, per_core=2, split_tokens=256, splits=32)
MANY = Sizes(warpgroups=2, block_tokens=128, per_core=1, split_tokens=1024, splits=1)


class Plan(NamedTuple):
    """Constants that the kernel's code depends on, besides the shapes of its operands."""

    options: Options
    tokens: int  # query tokens of a tile
    groups: int  # G, query heads that share a head as walked
    sharing: int  # walked heads per kv head; one with more than 64 query heads counts as several
    # M, query rows that are copied for a tile and head; row t * G + g is token t's, and the rows
    # behind are padding.
    rows: int
    warpgroups: int  # those that multiply
    piece_tokens: int  # tokens of one copy, all of one page
    block_tokens: int  # B, kv positions of a block
    stages: int  # blocks that may be in flight
    per_core: int  # thread blocks on a multiprocessor
    split_tokens: int
    splits: int  # S, the largest number of parts of a tile, each of split_tokens at least
    cores: int  # multiprocessors

    @property
    def has_fetcher(self) -> bool:
        """Return whether one warpgroup only fetches, and turns 8-bit numbers into bfloat16.

        Thread blocks that share a multiprocessor need none: while one waits, another multiplies.
        """
        return self.per_core == 1 or self.options.layout.scaled

    @property
    def is_latent(self) -> bool:
        """Return whether pages are latent, with one array for keys and values."""
        return self.options.layout.value_dim is not None

    @property
    def heads(self) -> int:
        """Return K, the heads as walked."""
        return self.options.layout.kv_heads * self.sharing

    @property
    def columns(self) -> int:
        """Return the columns of a value that one warpgroup adds up."""
        return self.options.layout.out_dim // (self.warpgroups if self.is_latent else 1)

    @property
    def has_parts(self) -> bool:
        """Return whether results are those of parts of rows.

        They are float32, and written some columns at a time.
        """
        return self.splits > 1 and not self.is_latent

    @property
    def result_columns(self) -> int:
        """Return the columns of a result that are written together."""
        return RESULT_COLUMNS if self.has_parts else self.columns

    @property
    def interpreted(self) -> bool:
        """Return whether the interpreter runs the kernel, and no GPU."""
        return self.cores == FEW_CORES

    @property
    def pieces(self) -> int:
        """Return the number of copies that fill a buffer with a block."""
        return self.block_tokens // self.piece_tokens


def few_tokens(options: Options, heads: int) -> int:
    """Return how many tokens of a row fit into one warpgroup's product with N `heads`."""
    return WARPGROUP_ROWS // _shared_out(options, heads)[0]


def _shared_out(options: Options, heads: int) -> tuple[int, int]:
    """Return G as walked, and the number of walked heads per kv head."""
    groups = heads // options.layout.kv_heads
    sharing = next(
        n for n in range(1, groups + 1) if groups % n == 0 and groups // n <= WARPGROUP_ROWS
    )
    return groups // sharing, sharing


def few_plan(
    options: Options, heads: int, tiles: int, tokens: int, context: int, sizes: Sizes | None = None
) -> Plan:
    """Return the plan for tiles that fit into one warpgroup's product.

    Args:
        heads: Number N of query heads of the shard.
        tiles: Number n of tiles, each with room for `tokens` tokens.
        context: Largest number of kv positions of a row.
        sizes: Sizes used in place of the table's.
    """
    groups, sharing = _shared_out(options, heads)
    rows = -(-tokens * groups // 8) * 8  # tiles of shared memory have 8 rows
    sizes = sizes or tuned(options, groups, "few")
    sizes = sizes._replace(splits=min(sizes.splits, -(-context // sizes.split_tokens)))
    return _plan(options, groups, sharing, tiles, tokens, rows, sizes)


def many_plan(options: Options, heads: int, sizes: Sizes | None = None) -> Plan:
    """Return the plan for tiles that fill the products of several warpgroups.

    There are N `heads`; `sizes` are used in place of the table's.
    """
    groups, sharing = _shared_out(options, heads)
    sizes = sizes or tuned(options, groups, "many")
    rows = WARPGROUP_ROWS * (1 if options.layout.value_dim else sizes.warpgroups)
    return _plan(options, groups, sharing, 1, rows // groups, rows, sizes._replace(splits=1))


def _plan(
    options: Options, groups: int, sharing: int, tiles: int, tokens: int, rows: int, sizes: Sizes
) -> Plan:
    """Return the plan with as many blocks in flight as shared memory has room for."""
    layout = options.layout
    if layout.value_dim is not None:
        sizes = sizes._replace(warpgroups=LATENT_WARPGROUPS, per_core=1)
        rows = WARPGROUP_ROWS
    if layout.scaled:
        # With the warpgroup that converts, a thread block has too many registers for two of them.
        sizes = sizes._replace(per_core=1)
    splits = max(1, min(sizes.splits, PARTIAL_ROWS // (tiles * layout.kv_heads * sharing * rows)))
    fixed, token_bytes = _shared_bytes(layout, sizes.warpgroups * WARPGROUP_ROWS, splits > 1)
    # Where two buffers do not fit: first fewer thread blocks on a multiprocessor, then smaller
    # blocks of positions.
    wanted = [(n, sizes.block_tokens) for n in range(sizes.per_core, 0, -1)] + [(1, LEAST_BLOCK)]
    for per_core, block_tokens in wanted:
        stages = (SHARED_BYTES // per_core - fixed) // (block_tokens * token_bytes)
        if stages >= 2:
            break
    else:
        raise KernelError(
            f"two blocks of heads of {layout.head_dim} in {layout.dtype} do not fit into "
            f"{SHARED_BYTES} bytes of shared memory (--attention reference)"
        )
    return Plan(
        *(options, tokens, groups, sharing, rows, sizes.warpgroups),
        piece_tokens=gcd(LEAST_BLOCK, layout.page_size),
        block_tokens=block_tokens,
        stages=stages,
        per_core=per_core,
        split_tokens=max(sizes.split_tokens, block_tokens),
        splits=splits,
        cores=cores_of(options.device_kind),
    )


def _shared_bytes(layout: Layout, rows: int, has_parts: bool) -> tuple[int, int]:
    """Return a thread block's bytes of shared memory: the fixed ones, and those per block token.

    All warpgroups together have `rows` query rows.
    """
    others = 3 * ALIGNMENT  # the driver's, the logarithms, barriers
    if layout.value_dim is not None:
        # All warpgroups share the queries, and results are written from registers.
        return WARPGROUP_ROWS * layout.head_dim * ELEMENT + others, layout.head_dim * ELEMENT
    staged = rows * RESULT_COLUMNS * 4 if has_parts else 0
    if not layout.scaled:
        return rows * layout.head_dim * ELEMENT + staged + others, 2 * layout.head_dim * ELEMENT
    scales = 2 * ALIGNMENT  # of K and V: a buffer is no smaller than the alignment
    return rows * layout.head_dim * ELEMENT + staged + others + scales, 2 * (
        layout.head_dim * (ELEMENT + 1) + 4
    )


def tuned(options: Options, groups: int, kind: str) -> Sizes:
    """Return the table's sizes for this shape on this chip, or the defaults.

    The walk's `kind` is "few" or "many".
    """
    default = {"few": FEW, "many": MANY}[kind]
    return default._replace(
        **_table()
        .get(options.device_kind, {})
        .get(shape_of(options.layout, groups), {})
        .get(kind, {})
    )


def shape_of(layout: Layout, groups: int) -> str:
    """Return the name, in the table, of the shape that sizes are tuned for."""
    return f"K{layout.kv_heads} G{groups} H{layout.head_dim} Z{layout.page_size} {layout.dtype}"


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]:
    """Return the table of tuned sizes: by device kind, then by shape, then by kind of walk."""
    return json.loads(
        files("jaxserve.pallas_kernels").joinpath("tuned/paged_attention_gpu.json").read_text()
    )["sizes"]
