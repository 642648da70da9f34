"""Bytes that attention and recurrent states move in plain XLA, where a chip has no kernel for them.

They are counted from what XLA makes of the references for an H200 (tests/deviceless compares them):

- attention gathers a block of pages as they are stored, and its two products read the copies. The
  scores of a block are written and read twice, the weights of a softmax once. Sums of values are
  read, increased and written back with every block.
- a recurrent state is read three times: for what it knows of the value, for the answer, and to be
  written into a copy, which is then read and written into the slot.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxserve.engine.plan import StepKind
from jaxserve.pallas_kernels.paged_attention.api import SCALE_BYTES, Layout
from jaxserve.pallas_kernels.paged_attention.reference import BLOCK_TOKENS, TILE_TOKENS

FLOAT32 = 4  # bytes of a score, and of a sum of values
STATE_PASSES = 3  # times that a state is read, and written or read again, instead of once


class References(NamedTuple):
    """Parts of a step beside the products of weights that run without a kernel."""

    queries: jnp.dtype | None = None  # of attention; None where a kernel runs it
    page_size: int = BLOCK_TOKENS  # tokens of a page, which a block of attention has at least
    states: bool = False  # True where decode steps advance states without a kernel


class Chunk(NamedTuple):
    """Queries of one row in a step, behind its context."""

    kind: StepKind
    context: int  # positions before the step
    tokens: int


def attention_bytes(
    references: References, layout: Layout, heads: int, chunk: Chunk, window: int | None
) -> float:
    """Return the bytes that attention of one row moves in one layer.

    The queries of a prompt go in tiles, each of which walks over the row's blocks by itself.

    Args:
        heads: Query heads of the device.
    """
    assert references.queries
    block = max(BLOCK_TOKENS, references.page_size)
    tile = 1 if chunk.kind == "decode" else min(TILE_TOKENS, chunk.tokens)
    end = chunk.context + chunk.tokens
    firsts = range(chunk.context, end, tile)
    walked = sum(_blocks(first, min(first + tile, end) - 1, block, window) for first in firsts)
    position = _copies(layout) + heads * tile * _of_a_score(references.queries)
    return walked * (block * position + heads * tile * layout.out_dim * 4 * FLOAT32)


def _blocks(first: int, last: int, block: int, window: int | None) -> int:
    """Return how many blocks a tile walks over, whose queries are at positions first to last."""
    begin = 0 if window is None else max(first - window + 1, 0)
    return last // block + 1 - begin // block


def _copies(layout: Layout) -> float:
    """Return the bytes of a position's keys and values: read, written as a copy, and read."""
    numbers = layout.kv_heads * (layout.head_dim + layout.out_dim)
    scales = 2 * layout.kv_heads * SCALE_BYTES if layout.scaled else 0
    return 3 * numbers * layout.bits / 8 + scales


def _of_a_score(queries: jnp.dtype) -> int:
    """Return the bytes of a score, written and read twice, and of its weight, once."""
    return 3 * FLOAT32 + 2 * queries.itemsize
