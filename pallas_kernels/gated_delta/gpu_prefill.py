"""Prompts with the gated delta rule on NVIDIA's Hopper, in Pallas (Mosaic GPU).

Two kernels, in the form of `chunked.py`: what the tokens of a block do to each other, for all
blocks of a step side by side (`gpu_blocks.py`), and the walk of a state over the blocks of its row
(`gpu_rows.py`). Products are as exact as in float32 (`gpu_parts.py`).

Bulk copies into swizzled memory begin at multiples of eight tokens: XLA moves the tokens so that
every row begins at one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.gated_delta.api import Heads
from jaxserve.pallas_kernels.gated_delta.gpu_blocks import BLOCK, STEP, within_blocks
from jaxserve.pallas_kernels.gated_delta.gpu_parts import parts_of
from jaxserve.pallas_kernels.gated_delta.gpu_row_fetch import Operands, Rows
from jaxserve.pallas_kernels.gated_delta.gpu_rows import over_rows
from jaxserve.pallas_kernels.gated_delta.row_blocks import cut
from jaxserve.pallas_kernels.short_convolution.api import Chunks


class Blocks(NamedTuple):
    """Blocks of tokens in the order of rows."""

    begin: Int[Array, "n"]  # eights of moved tokens before the block's first
    size: Int[Array, "n"]  # tokens, 0 behind the last block


class Places(NamedTuple):
    """Places of tokens on the way to the kernels, and of their answers."""

    moved: Int[Array, "W"]  # token at each place of the moved ones; T for none
    answer: Int[Array, "T"]  # place of each token among those of all blocks; any for padding


def blocks_of(chunks: Chunks, slots: int) -> tuple[Blocks, Rows, Places]:
    """Cut rows into blocks of tokens.

    Args:
        slots: Number of slots, which stands for none.
    """
    # A block reads behind the last row.
    width = len(chunks.chunk) + STEP * len(chunks.sizes) + BLOCK
    found = cut(chunks, BLOCK, STEP, width)
    row = found.row
    blocks = Blocks(
        begin=found.starts[row] + found.behind // STEP,
        size=jnp.clip(chunks.sizes[row] - found.behind, 0, BLOCK),
    )
    empty = chunks.read >= slots
    walks = Rows(
        blocks=found.counts,
        first=found.first,
        start=found.starts,
        size=chunks.sizes,
        read=jnp.where(empty, chunks.write, chunks.read),
        write=chunks.write,
        empty=empty,
    )
    answer = found.first[chunks.chunk] * BLOCK + found.place
    places = Places(found.moved, jnp.where(found.inside, answer, 0))
    return jax.tree.map(lambda x: x.astype(jnp.int32), (blocks, walks, places))


@jax.enable_x64(False)
def prefill(
    heads: Heads, memory: Float[Array, "s k r d v"], chunks: Chunks
) -> tuple[Float[Array, "T k r v"], Float[Array, "s k r d v"]]:
    """Advance rows over their tokens; see `api.GatedDelta.prefill`."""
    _, k, r, v = heads.value.shape
    blocks, rows, places = blocks_of(chunks, len(memory))
    moved = jax.tree.map(lambda x: x.at[places.moved].get(mode="fill", fill_value=0), heads)
    query, key = (parts_of(x) for x in (moved.query, moved.key))
    rates = _rates(moved, blocks)
    inverse, scores = within_blocks(*blocks, query, key, rates)
    value = moved.value.reshape(-1, k * r, v)
    out, memory = over_rows(rows, Operands(query, key, value, rates, inverse, scores), memory)
    answers = out.reshape(-1, k, r, v)[places.answer]
    # Blocks of no row hold anything, and belong to no token.
    return jnp.where(chunks.live[:, None, None, None], answers, 0), memory


def _rates(moved: Heads, blocks: Blocks) -> Float[Array, "n h 3 C"]:
    """Return the rates of each block; see `gpu_blocks.RATES`."""
    token = jnp.arange(BLOCK)[None]
    index = blocks.begin[:, None] * STEP + token
    live = (token < blocks.size[:, None])[..., None, None]
    own = (jnp.where(live, x[index], 0) for x in (moved.decay, moved.writing))
    decay, writing = (x.reshape(*index.shape, -1).transpose(0, 2, 1) for x in own)
    total = jnp.cumsum(decay, axis=-1)
    return jnp.stack([total, writing, total], axis=2)
