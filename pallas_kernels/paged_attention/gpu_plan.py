"""How the Hopper kernel cuts a step: the sizes of its tiles, blocks and buffers, by chip and
shape."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from math import gcd
from typing import NamedTuple

from pallas_kernels.hopper import ALIGNMENT, FEW_CORES, SHARED_BYTES, WARPGROUP_ROWS, cores_of
from pallas_kernels.paged_attention.api import KernelError, Layout, Options

RESULT_COLUMNS = 64  # of a part's result that are handed out together, for want of shared memory
LEAST_BLOCK = 64  # kv positions
PARTIAL_ROWS = 2**16  # of split results: they are written, and read whole
ELEMENT = 2  # bytes of a bfloat16


class Sizes(NamedTuple):
    """What may be tuned, of one kind of walk.

    warpgroups: that multiply, 64 query rows each. block_tokens: kv positions of a block, a multiple
    of 64. per_core: thread blocks that share a multiprocessor, at most. split_tokens: kv positions
    of a part, at least, where rows are split; splits: parts of a row, at most.
    """

    warpgroups: int
    block_tokens: int
    per_core: int
    split_tokens: int
    splits: int


# that share a tile's rows and have half of a value each, or its result would fill all registers
LATENT_WARPGROUPS = 2
FEW = Sizes(warpgroups=1, block_tokens=64, per_core=2, split_tokens=256, splits=32)
MANY = Sizes(warpgroups=2, block_tokens=128, per_core=1, split_tokens=1024, splits=1)


class Plan(NamedTuple):
    """What the kernel's code depends on beside its operands' shapes.

    tokens: query tokens of a tile. groups: G, query heads that share a head here: where more than
    64 share a kv head, it counts as several. rows: M, query rows that are brought for a tile and
    head; t * G + g is token t's, those behind are padding. piece_tokens: of one copy, all of one
    page; block_tokens: kv positions of a block. stages: blocks that may be under way. splits: S,
    parts of a tile at most, of split_tokens at least. cores: multiprocessors.
    """

    options: Options
    tokens: int
    groups: int
    sharing: int
    rows: int
    warpgroups: int
    piece_tokens: int
    block_tokens: int
    stages: int
    per_core: int
    split_tokens: int
    splits: int
    cores: int

    @property
    def has_fetcher(self) -> bool:
        """A warpgroup that only fetches, and turns 8-bit numbers into bfloat16.

        Not where thread blocks share a multiprocessor: there another one multiplies while this one
        waits.
        """
        return self.per_core == 1 or self.options.layout.scaled

    @property
    def is_latent(self) -> bool:
        return self.options.layout.value_dim is not None

    @property
    def heads(self) -> int:
        """K as walked."""
        return self.options.layout.kv_heads * self.sharing

    @property
    def columns(self) -> int:
        """Of a value and one multiplying warpgroup."""
        return self.options.layout.out_dim // (self.warpgroups if self.is_latent else 1)

    @property
    def has_parts(self) -> bool:
        """Results are those of parts, in float32, and handed out some columns at a time."""
        return self.splits > 1 and not self.is_latent

    @property
    def result_columns(self) -> int:
        return RESULT_COLUMNS if self.has_parts else self.columns

    @property
    def interpreted(self) -> bool:
        return self.cores == FEW_CORES

    @property
    def pieces(self) -> int:
        """Of a block."""
        return self.block_tokens // self.piece_tokens


def few_tokens(options: Options, heads: int) -> int:
    """How many tokens of a row fit into one warpgroup's product; N query heads."""
    return WARPGROUP_ROWS // _shared_out(options, heads)[0]


def _shared_out(options: Options, heads: int) -> tuple[int, int]:
    """G as walked, and how many heads a kv head counts for."""
    groups = heads // options.layout.kv_heads
    sharing = next(
        n for n in range(1, groups + 1) if groups % n == 0 and groups // n <= WARPGROUP_ROWS
    )
    return groups // sharing, sharing


def few_plan(
    options: Options, heads: int, tiles: int, tokens: int, context: int, sizes: Sizes | None = None
) -> Plan:
    """Of tiles that fit into one warpgroup's product. heads: N of the shard. tiles: n, each with so
    many tokens.

    context: kv positions of a row, at most. sizes: instead of the table's.
    """
    groups, sharing = _shared_out(options, heads)
    rows = -(-tokens * groups // 8) * 8
    sizes = sizes or tuned(options, groups, "few")
    sizes = sizes._replace(splits=min(sizes.splits, -(-context // sizes.split_tokens)))
    return _plan(options, groups, sharing, tiles, tokens, rows, sizes)


def many_plan(options: Options, heads: int, sizes: Sizes | None = None) -> Plan:
    """Of tiles that fill the products of several warpgroups. sizes: instead of the table's."""
    groups, sharing = _shared_out(options, heads)
    sizes = sizes or tuned(options, groups, "many")
    rows = WARPGROUP_ROWS * (1 if options.layout.value_dim else sizes.warpgroups)
    return _plan(options, groups, sharing, 1, rows // groups, rows, sizes._replace(splits=1))


def _plan(
    options: Options, groups: int, sharing: int, tiles: int, tokens: int, rows: int, sizes: Sizes
) -> Plan:
    layout = options.layout
    if layout.value_dim is not None:
        sizes = sizes._replace(warpgroups=LATENT_WARPGROUPS, per_core=1)
        rows = WARPGROUP_ROWS
    if layout.scaled:
        sizes = sizes._replace(
            per_core=1
        )  # with the warpgroup that converts it has too many registers for two
    splits = max(1, min(sizes.splits, PARTIAL_ROWS // (tiles * layout.kv_heads * sharing * rows)))
    fixed, token_bytes = _shared_bytes(layout, sizes.warpgroups * WARPGROUP_ROWS, splits > 1)
    # Fewer thread blocks of a multiprocessor where they do not fit, and then smaller blocks.
    wanted = [(n, sizes.block_tokens) for n in range(sizes.per_core, 0, -1)] + [(1, LEAST_BLOCK)]
    for per_core, block_tokens in wanted:
        stages = (SHARED_BYTES // per_core - fixed) // (block_tokens * token_bytes)
        if stages >= 2:
            break
    else:
        raise KernelError(
            f"two blocks of heads of {layout.head_dim} in {layout.dtype} do not fit into "
            f"{SHARED_BYTES} bytes of "
            "shared memory (--attention reference)"
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
    """Of shared memory: what a thread block takes whatever its blocks, and what every token of a
    block takes.
    """
    others = 3 * ALIGNMENT  # the driver's, the logarithms, barriers
    if layout.value_dim is not None:  # queries for all warpgroups; results go out from registers
        return WARPGROUP_ROWS * layout.head_dim * ELEMENT + others, layout.head_dim * ELEMENT
    staged = rows * RESULT_COLUMNS * 4 if has_parts else 0
    if not layout.scaled:
        return rows * layout.head_dim * ELEMENT + staged + others, 2 * layout.head_dim * ELEMENT
    scales = 2 * ALIGNMENT  # of few tokens: a buffer is no smaller
    return rows * layout.head_dim * ELEMENT + staged + others + scales, 2 * (
        layout.head_dim * (ELEMENT + 1) + 4
    )


def tuned(options: Options, groups: int, kind: str) -> Sizes:
    """The table's sizes for this shape on this chip, or the defaults. kind: few, many."""
    default = {"few": FEW, "many": MANY}[kind]
    return default._replace(
        **_table()
        .get(options.device_kind, {})
        .get(shape_of(options.layout, groups), {})
        .get(kind, {})
    )


def shape_of(layout: Layout, groups: int) -> str:
    """A name for what the sizes depend on."""
    return f"K{layout.kv_heads} G{groups} H{layout.head_dim} Z{layout.page_size} {layout.dtype}"


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]:
    return json.loads(
        files("pallas_kernels").joinpath("tuned/paged_attention_gpu.json").read_text()
    )["sizes"]
