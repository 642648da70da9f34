"""How the Hopper kernel cuts a step: the sizes of its tiles, blocks and buffers, by chip and shape."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from pallas_kernels.paged_attention.api import KernelError, Layout, Options

WARPGROUP_ROWS = 64  # of a matrix product of one warpgroup (wgmma)
CORES, FEW_CORES = 132, 2  # multiprocessors of an H100 or H200; in the interpreter, which has one thread for them all
SHARED_BYTES, OTHER_BYTES = 227 * 1024, 2048  # of shared memory of a multiprocessor; what barriers and the like take
PARTIAL_ROWS = 2**16  # of split results: they are written, and read whole
ELEMENT = 2  # bytes of a bfloat16


class Sizes(NamedTuple):
    """What may be tuned, of one kind of walk.

    warpgroups: that multiply, 64 query rows each. block_tokens: kv positions of a block, at most. per_core: thread
    blocks that share a multiprocessor, at most. split_tokens: kv positions of a part, at least, where rows are split;
    splits: parts of a row, at most.
    """

    warpgroups: int
    block_tokens: int
    per_core: int
    split_tokens: int
    splits: int


FEW = Sizes(warpgroups=1, block_tokens=64, per_core=2, split_tokens=256, splits=32)
MANY = Sizes(warpgroups=2, block_tokens=128, per_core=1, split_tokens=1024, splits=1)


class Plan(NamedTuple):
    """What the kernel's code depends on beside its operands' shapes.

    tokens: query tokens of a tile. rows: M, query rows that are brought for a tile and kv head; t * G + g is token t's,
    those behind are padding. stages: blocks of keys and values that may be under way. splits: S, parts of a tile at
    most, of split_pages at least. cores: multiprocessors.
    """

    options: Options
    tokens: int
    groups: int
    rows: int
    warpgroups: int
    block_pages: int
    stages: int
    per_core: int
    split_pages: int
    splits: int
    cores: int

    @property
    def has_fetcher(self) -> bool:
        """A warpgroup that only fetches."""
        return self.warpgroups > 1

    @property
    def interpreted(self) -> bool:
        return self.cores == FEW_CORES

    @property
    def page_size(self) -> int:
        return self.options.layout.page_size

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.page_size


def few_tokens(options: Options, heads: int) -> int:
    """How many tokens of a row fit into one warpgroup's product; N query heads."""
    return WARPGROUP_ROWS // (heads // options.layout.kv_heads)


def few_plan(options: Options, heads: int, tiles: int, tokens: int) -> Plan:
    """Of tiles that fit into one warpgroup's product. heads: N of the shard. tiles: n, each with so many tokens."""
    groups = heads // options.layout.kv_heads
    rows = -(-tokens * groups // 8) * 8
    return _plan(options, groups, tiles, tokens, rows, tuned(options, groups, "few"))


def many_plan(options: Options, heads: int) -> Plan:
    """Of tiles that fill the products of several warpgroups."""
    groups = heads // options.layout.kv_heads
    sizes = tuned(options, groups, "many")
    rows = sizes.warpgroups * WARPGROUP_ROWS
    return _plan(options, groups, 1, rows // groups, rows, sizes._replace(splits=1))


def _plan(options: Options, groups: int, tiles: int, tokens: int, rows: int, sizes: Sizes) -> Plan:
    layout = options.layout
    splits = max(1, min(sizes.splits, PARTIAL_ROWS // (tiles * layout.kv_heads * rows)))
    on_chip = options.device_kind.startswith("NVIDIA")
    fixed = sizes.warpgroups * WARPGROUP_ROWS * layout.head_dim * (ELEMENT + (4 if splits > 1 else 0)) + OTHER_BYTES
    for per_core, pages in _choices(sizes, layout.page_size):
        block_bytes = 2 * pages * layout.page_size * layout.head_dim * ELEMENT
        stages = (SHARED_BYTES // per_core - fixed) // block_bytes
        if stages >= 2:
            break
    else:
        raise KernelError(
            f"two pages of {layout.page_size} tokens with heads of {layout.head_dim} do not fit into {SHARED_BYTES} "
            "bytes of shared memory (smaller pages: --page-size, or --attention reference)"
        )
    split_pages = max(1, sizes.split_tokens // layout.page_size // pages) * pages
    cores = CORES if on_chip else FEW_CORES
    return Plan(options, tokens, groups, rows, sizes.warpgroups, pages, stages, per_core, split_pages, splits, cores)


def _choices(sizes: Sizes, page_size: int) -> list[tuple[int, int]]:
    """(thread blocks of a multiprocessor, pages of a block), the most wanted first."""
    pages = max(1, sizes.block_tokens // page_size)
    shared = [(per_core, pages) for per_core in range(sizes.per_core, 0, -1)]
    return shared + [(1, fewer) for fewer in range(pages - 1, 0, -1)]


def tuned(options: Options, groups: int, kind: str) -> Sizes:
    """The table's sizes for this shape on this chip, or the defaults. kind: few, many."""
    default = {"few": FEW, "many": MANY}[kind]
    return default._replace(
        **_table().get(options.device_kind, {}).get(shape_of(options.layout, groups), {}).get(kind, {})
    )


def shape_of(layout: Layout, groups: int) -> str:
    """A name for what the sizes depend on."""
    return f"K{layout.kv_heads} G{groups} H{layout.head_dim} Z{layout.page_size} {layout.dtype}"


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]:
    return json.loads(files("pallas_kernels").joinpath("tuned/paged_attention_gpu.json").read_text())["sizes"]
