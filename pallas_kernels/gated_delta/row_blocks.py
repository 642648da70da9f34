"""Rows of tokens, cut into blocks and moved so that each row begins at a multiple of a step."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.pallas_kernels.short_convolution.api import Chunks


class RowBlocks(NamedTuple):
    """Blocks in the order of rows, and places of their tokens."""

    counts: Int[Array, "R"]  # blocks of each row
    first: Int[Array, "R"]  # number of the row's first block
    row: Int[Array, "n"]  # row of each block; the last one for those that do not exist
    behind: Int[Array, "n"]  # tokens of the row that are before the block
    starts: Int[Array, "R"]  # steps of moved tokens before each row
    moved: Int[Array, "W"]  # token at each place of the moved ones; T for none
    place: Int[Array, "T"]  # of each token in its row
    inside: Bool[Array, "T"]  # whether the token belongs to its row


def cut(chunks: Chunks, block: int, step: int, width: int) -> RowBlocks:
    """Cut the rows of a step into blocks.

    Args:
        block: Most tokens of a block.
        step: Number of tokens, at a multiple of which each row begins when it has been moved.
        width: Places of moved tokens, enough for T and a step for each row.
    """
    tokens = len(chunks.chunk)
    rows = len(chunks.sizes)
    counts = -(-chunks.sizes // block)
    ends = jnp.cumsum(counts)
    first = ends - counts
    nth = jnp.arange(tokens // block + rows)
    row = jnp.searchsorted(ends, nth, side="right", method="compare_all")
    row = jnp.minimum(row, rows - 1)
    moved_sizes = -(-chunks.sizes // step)
    starts = jnp.cumsum(moved_sizes) - moved_sizes

    own = chunks.chunk
    place = jnp.arange(tokens) - chunks.starts[own]
    # Padding may belong to any row, and lies behind its tokens.
    inside = (place >= 0) & (place < chunks.sizes[own])
    to = jnp.where(inside, starts[own] * step + place, width)
    moved = jnp.full(width, tokens).at[to].set(jnp.arange(tokens), mode="drop")
    return RowBlocks(counts, first, row, (nth - first[row]) * block, starts, moved, place, inside)
