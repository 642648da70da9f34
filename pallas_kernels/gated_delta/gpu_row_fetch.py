"""Operands of the walk over a row of a prompt on Hopper, and the warpgroup that fetches them.

Each operand has one buffer in shared memory. It is filled for the next block as soon as the
warpgroup that computes is done with it.
"""

from functools import partial
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jaxserve.pallas_kernels.gated_delta.gpu_blocks import BLOCK, STEP, fetch_tokens
from jaxserve.pallas_kernels.gated_delta.gpu_parts import PARTS

# Operands in the order in which a block wants them.
WANTED: Final = ("key", "query", "rates", "value", "inverse", "scores")

Scalar = Any  # an int32: a value of the kernel, or a constant


class Rows(NamedTuple):
    """Rows of a step."""

    blocks: Int[Array, "R"]  # number of blocks, 0 for a row that does not run
    first: Int[Array, "R"]  # the first of them among all rows'
    start: Int[Array, "R"]  # the first token, in steps
    size: Int[Array, "R"]  # tokens
    read: Int[Array, "R"]  # slot of the state before
    write: Int[Array, "R"]  # slot of the state behind
    empty: Int[Array, "R"]  # 1 where the state before is empty


class Operands(NamedTuple):
    """Operands of blocks, in global or in shared memory."""

    query: Any  # [PARTS, W, k, d], in shared memory [d / 64, PARTS, 64, 64]
    key: Any  # [PARTS, W, k, d], in shared memory [d / 64, PARTS, 64, 64]
    value: Any  # [W, k r, v], in shared memory [64, columns]
    rates: Any  # [n, k r, 3, 64], in shared memory [3, 64]; see gpu_blocks.RATES
    inverse: Any  # [n, k r, PARTS, 64, 64], in shared memory [PARTS, 64, 64]
    scores: Any  # [n, k r, PARTS, 64, 64], in shared memory [PARTS, 64, 64]


class Place(NamedTuple):
    """Part of the work that a thread block has."""

    row: Scalar
    head: Scalar  # value head
    key_head: Scalar
    columns: Any  # slice


class Fetcher(NamedTuple):
    """Work of the warpgroup that fetches."""

    rows: Rows
    operands: Operands  # in global memory
    buffers: Operands  # in shared memory
    full: Operands  # barriers: the copies into a buffer have landed
    free: Operands  # barriers: a buffer may be overwritten

    def run(self, place: Place) -> None:
        """Fetch the operands of all blocks of a row."""

        def one(nth: Scalar, _: None) -> None:
            for name in WANTED:
                free = getattr(self.free, name)
                pl.when(nth > 0)(partial(plgpu.barrier_wait, free))
                self._fetch(name, place, nth)

        lax.fori_loop(0, self.rows.blocks[place.row], one, None)

    def _fetch(self, name: str, place: Place, nth: Scalar) -> None:
        """Start the copies of an operand of the row's nth block."""
        source, buffer, full = (
            getattr(refs, name) for refs in (self.operands, self.buffers, self.full)
        )
        begin = self.rows.start[place.row] * STEP + nth * BLOCK
        tokens = pl.ds(pl.multiple_of(begin, STEP), BLOCK)
        block = self.rows.first[place.row] + nth
        if name in ("query", "key"):
            fetch_tokens(source, tokens, place.key_head, buffer, full)
        elif name == "value":
            plgpu.copy_gmem_to_smem(source.at[tokens, place.head, place.columns], buffer, full)
        elif name == "rates":
            plgpu.copy_gmem_to_smem(source.at[block, place.head], buffer, full)
        else:
            for part in range(PARTS):
                plgpu.copy_gmem_to_smem(source.at[block, place.head, part], buffer.at[part], full)

    def give_back(self, place: Place, nth: Scalar, *names: str) -> None:
        """Let buffers be filled for the block behind the nth: called by the other warpgroup."""
        is_last = nth + 1 == self.rows.blocks[place.row]
        for name in names:
            free = getattr(self.free, name)
            pl.when(jnp.logical_not(is_last))(partial(plgpu.barrier_arrive, free))
