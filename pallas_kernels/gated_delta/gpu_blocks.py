"""Blocks of a prompt with the gated delta rule on Hopper: what their tokens do to each other.

A thread block has 64 tokens of one row and one value head, and no state: all blocks of a step run
side by side. It hands out two triangular matrices, those by which `gpu_rows.py` turns a block's
wrong values into changes of the state, and changes into answers.
"""

import itertools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from jaxserve.pallas_kernels.gated_delta.gpu_parts import PARTS, each, product, store, turned
from jaxserve.pallas_kernels.hopper import tiled

BLOCK: Final = 64  # tokens of a block: rows of a matrix product of one warpgroup
STEP: Final = 8  # a block's first token is a multiple of it: the height of a tile in shared memory
# Of a token: the logarithm of the product of decays up to it, the strength of writing, and the
# logarithm again, since Mosaic makes one load of two, and cannot lay out its result in two ways.
RATES: Final = 3
WGMMA: Final = plgpu.Layout.WGMMA


class Inputs(NamedTuple):
    """Operands in global memory."""

    begin: Any  # [n], the first token of each block, in steps
    size: Any  # [n], tokens of each block, 0 where there is none
    query: Any  # [PARTS, W, k, d]
    key: Any  # [PARTS, W, k, d]
    rates: Any  # [n, k r, 3, 64], see `RATES`


class Outputs(NamedTuple):
    """Results in global memory."""

    inverse: Any  # [n, k r, PARTS, 64, 64]
    scores: Any  # [n, k r, PARTS, 64, 64]


class Shared(NamedTuple):
    """Buffers and barriers in shared memory."""

    query: Any  # [d / 64, PARTS, 64, 64]
    key: Any  # [d / 64, PARTS, 64, 64]
    rates: Any  # [RATES, 64]
    query_full: Any
    key_full: Any
    rates_full: Any


def within_blocks(
    begin: Int[Array, "n"],
    size: Int[Array, "n"],
    query: BFloat16[Array, "p W k d"],
    key: BFloat16[Array, "p W k d"],
    rates: Float[Array, "n h 3 C"],
) -> tuple[BFloat16[Array, "n h p C C"], BFloat16[Array, "n h p C C"]]:
    """Return the inverses and the scores of all blocks, in parts; see `Inputs`."""
    n, heads, _, _ = rates.shape
    d = query.shape[-1]

    def gated_delta_blocks(*refs: Any) -> None:
        Body(Inputs(*refs[:5]), Outputs(*refs[5:7]), Shared(*refs[7:])).run()

    triangle = jax.ShapeDtypeStruct((n, heads, PARTS, BLOCK, BLOCK), jnp.bfloat16)
    pieces = d // BLOCK
    operand = tiled((pieces, PARTS, BLOCK, BLOCK), jnp.dtype(jnp.bfloat16))
    landed = plgpu.Barrier(num_arrivals=pieces * PARTS)
    return plgpu.kernel(
        gated_delta_blocks,  # the name that profiles show
        out_type=(triangle, triangle),
        scratch_types=Shared(
            query=operand,
            key=operand,
            rates=plgpu.SMEM((RATES, BLOCK), jnp.float32),
            query_full=landed,
            key_full=landed,
            rates_full=plgpu.Barrier(),
        ),
        grid=(n, heads),
        grid_names=("block", "head"),
    )(begin, size, query, key, rates)


class Body(NamedTuple):
    """Work of one thread block: one value head of one block of tokens."""

    inputs: Inputs
    outputs: Outputs
    shared: Shared

    def run(self) -> None:
        """Compute the block's matrices, if there is such a block."""
        block = lax.axis_index("block")
        head = lax.axis_index("head")
        size = self.inputs.size[block]

        @pl.when(size > 0)
        def _() -> None:
            self._fetch(block, head)
            self._compute(block, head, size)

    def _fetch(self, block: Any, head: Any) -> None:
        inputs = self.inputs
        shared = self.shared
        r = lax.axis_size("head") // inputs.key.shape[2]
        key_head = lax.div(head, jnp.int32(r))
        tokens = pl.ds(pl.multiple_of(inputs.begin[block] * STEP, STEP), BLOCK)
        plgpu.copy_gmem_to_smem(inputs.rates.at[block, head], shared.rates, shared.rates_full)
        fetch_tokens(inputs.key, tokens, key_head, shared.key, shared.key_full)
        fetch_tokens(inputs.query, tokens, key_head, shared.query, shared.query_full)

    def _compute(self, block: Any, head: Any, size: Any) -> None:
        shared = self.shared
        row, column = _indices()
        # What lies behind the block's tokens are those of other rows, or NaN.
        inside = (row >= column) & (row < size)
        plgpu.barrier_wait(shared.rates_full)
        by_row = wide(shared.rates.at[0], 1)
        by_column = wide(shared.rates.at[2], 0)
        # Above the diagonal the difference is positive, and its exponential could overflow.
        between = jnp.exp(jnp.where(inside, by_row - by_column, -jnp.inf))
        plgpu.barrier_wait(shared.key_full)
        keys = _over_pieces(shared.key, shared.key) * between * wide(shared.rates.at[1], 1)
        plgpu.barrier_wait(shared.query_full)
        scores = _over_pieces(shared.query, shared.key) * between
        nothing = jnp.zeros_like(scores)
        # Both operands have been read: their memory is free for smaller matrices.
        first, second = (shared.query.at[piece] for piece in (0, 1))
        third = shared.key.at[0]
        store(first, jnp.where(inside, scores, nothing))
        self._hand_out(first, self.outputs.scores.at[block, head])
        found = _inverse(jnp.where(inside, keys, nothing), second, third)
        store(second, found)
        self._hand_out(second, self.outputs.inverse.at[block, head])
        plgpu.wait_smem_to_gmem(0)

    def _hand_out(self, buffer: Any, target: Any) -> None:
        for nth in range(PARTS):
            plgpu.copy_smem_to_gmem(buffer.at[nth], target.at[nth])


def _inverse(x: jax.Array, left: Any, right: Any) -> jax.Array:
    """Invert a unit lower triangular matrix; see `chunked.inverse`.

    Args:
        left: Room in shared memory for the parts of a matrix.
        right: Room for another one.
    """
    row, column = _indices()

    def below(log: int | jax.Array) -> jax.Array:
        """Return the numbers beside the blocks of 2 ** log numbers on the diagonal."""
        block = row >> log
        beside = ((block & 1) == 1) & (block == (column >> log) + 1)
        return jnp.where(beside, x, jnp.zeros_like(x))

    def double(log: jax.Array, found: jax.Array) -> jax.Array:
        store(left, below(log))
        store(right, found)
        known = product((each(left), each(right)))
        store(left, known)
        return found - product((each(right), each(left)))

    one = jnp.where(row == column, jnp.ones_like(x), jnp.zeros_like(x))
    return lax.fori_loop(1, (BLOCK - 1).bit_length(), double, one - below(0))


def _over_pieces(x: Any, y: Any) -> jax.Array:
    """Return x times the transposed y, both [d / 64, PARTS, 64, 64]."""
    pieces = range(x.shape[0])
    return product(*((each(x.at[piece]), turned(y.at[piece])) for piece in pieces))


def fetch_tokens(source: Any, tokens: Any, head: Any, buffer: Any, full: Any) -> None:
    """Start to copy queries or keys [PARTS, W, k, d] into a buffer [d / 64, PARTS, 64, 64]."""
    for piece, part in itertools.product(range(buffer.shape[0]), range(PARTS)):
        numbers = pl.ds(piece * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(
            source.at[part, tokens, head, numbers], buffer.at[piece, part], full
        )


def _indices() -> tuple[jax.Array, jax.Array]:
    """Return the row and the column of each number of a matrix of a block."""
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis, layout=WGMMA) for axis in (0, 1)
    )
    return row, column


def wide(vector: Any, axis: int) -> jax.Array:
    """Load a number for each row (axis 1) or column (axis 0) of a block's matrix."""
    numbers = plgpu.load(vector, layout=WGMMA.reduce(axis), optimized=False)
    return lax.broadcast_in_dim(numbers, (BLOCK, BLOCK), [1 - axis])
