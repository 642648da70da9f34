"""Rows of prompts with the gated delta rule on Hopper: a state stays in registers for its row.

A thread block has 64 columns of one value head's state, which do not depend on the others, and
walks over the blocks of 64 tokens of one row. One warpgroup fetches (`gpu_row_fetch.py`), the other
one computes.
"""

from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxserve.pallas_kernels.gated_delta.gpu_blocks import BLOCK, RATES, WGMMA, wide
from jaxserve.pallas_kernels.gated_delta.gpu_parts import PARTS, each, product, store, turned
from jaxserve.pallas_kernels.gated_delta.gpu_row_fetch import (
    Fetcher,
    Operands,
    Place,
    Rows,
    Scalar,
)
from jaxserve.pallas_kernels.hopper import tiled

COLUMNS: Final = 64  # of a state, of one thread block
FETCHING: Final = 1  # the warpgroup that fetches

State = tuple[jax.Array, ...]  # pieces [64, COLUMNS] of a state, 64 rows each


class Shared(NamedTuple):
    """Buffers and barriers in shared memory."""

    buffers: Operands
    full: Operands  # barriers: the copies into a buffer have landed
    free: Operands  # barriers: a buffer may be overwritten
    work: Any  # [d / 64, PARTS, 64, COLUMNS]: the state, and then changes of it
    staged: Any  # [64, COLUMNS]: answers, or a piece of a state
    landed: Any  # barrier: a piece of a state has landed


def over_rows(
    rows: Rows, operands: Operands, memory: Float[Array, "s k r d v"]
) -> tuple[Float[Array, "n C h v"], Float[Array, "s k r d v"]]:
    """Advance the states of rows, in place, and return the answers of each block."""
    _, k, r, d, v = memory.shape
    blocks = len(operands.rates)
    pool = jax.new_ref(memory)
    count = len(rows)
    given = count + len(operands)

    def gated_delta_prefill(*refs: Any) -> None:
        Body(
            Rows(*refs[:count]),
            Operands(*refs[count:given]),
            refs[given],
            refs[given + 1],
            Shared(*refs[given + 2 :]),
        ).run()

    out = plgpu.kernel(
        gated_delta_prefill,  # the name that profiles show
        out_type=jax.ShapeDtypeStruct((blocks, BLOCK, k * r, v), jnp.float32),
        scratch_types=_scratch(d),
        grid=(len(rows.blocks), k * r, v // COLUMNS),
        grid_names=("row", "head", "tile"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )(*rows, *operands, pool)
    return out, jax.freeze(pool)


def _scratch(d: int) -> Shared:
    """Return the shared memory and barriers of a thread block."""
    pieces = d // BLOCK
    bfloat16 = jnp.dtype(jnp.bfloat16)
    tokens = tiled((pieces, PARTS, BLOCK, BLOCK), bfloat16)
    triangle = tiled((PARTS, BLOCK, BLOCK), bfloat16)
    tile = tiled((BLOCK, COLUMNS), jnp.dtype(jnp.float32))
    of_tokens = plgpu.Barrier(num_arrivals=pieces * PARTS)
    of_triangle = plgpu.Barrier(num_arrivals=PARTS)
    whole = plgpu.Barrier()
    rates = plgpu.SMEM((RATES, BLOCK), jnp.float32)
    return Shared(
        buffers=Operands(tokens, tokens, tile, rates, triangle, triangle),
        full=Operands(of_tokens, of_tokens, whole, whole, of_triangle, of_triangle),
        free=Operands(*(whole for _ in Operands._fields)),
        work=tiled((pieces, PARTS, BLOCK, COLUMNS), bfloat16),
        staged=tile,
        landed=whole,
    )


class Body(NamedTuple):
    """Work of one thread block: columns of a value head's state, over one row."""

    rows: Rows
    operands: Operands  # in global memory
    memory: Any  # [s, k, r, d, v] in global memory, updated in place
    out: Any  # [n, 64, k r, v] in global memory
    shared: Shared

    def run(self) -> None:
        """Walk over the row, if it runs."""
        head = lax.axis_index("head")
        r = self.memory.shape[2]
        begin = pl.multiple_of(lax.axis_index("tile") * COLUMNS, COLUMNS)
        place = Place(
            lax.axis_index("row"), head, lax.div(head, jnp.int32(r)), pl.ds(begin, COLUMNS)
        )
        runs = self.rows.blocks[place.row] > 0
        fetches = lax.axis_index("warpgroup") == FETCHING
        pl.when(runs & fetches)(partial(self._fetcher.run, place))
        pl.when(runs & jnp.logical_not(fetches))(partial(self._walk, place))

    @property
    def _fetcher(self) -> Fetcher:
        return Fetcher(self.rows, self.operands, *self.shared[:3])

    def _walk(self, place: Place) -> None:
        blocks = self.rows.blocks[place.row]
        state = lax.fori_loop(0, blocks, partial(self._block, place), self._read(place))
        self._write(place, state)
        plgpu.wait_smem_to_gmem(0)

    def _pieces(self, slot: Scalar, place: Place) -> list[Any]:
        """Return the thread block's part of a slot, in pieces [64, COLUMNS]."""
        _, _, r, d, _ = self.memory.shape
        nth = lax.rem(place.head, jnp.int32(r))
        return [
            self.memory.at[slot, place.key_head, nth, pl.ds(begin, BLOCK), place.columns]
            for begin in range(0, d, BLOCK)
        ]

    def _read(self, place: Place) -> State:
        """Return the state before the row."""
        # The slot of an empty state may hold NaN.
        is_empty = jnp.broadcast_to(self.rows.empty[place.row] == 1, (BLOCK, COLUMNS))
        found = []
        for piece in self._pieces(self.rows.read[place.row], place):
            plgpu.copy_gmem_to_smem(piece, self.shared.staged, self.shared.landed)
            plgpu.barrier_wait(self.shared.landed)
            old = plgpu.load(self.shared.staged, layout=WGMMA)
            found.append(jnp.where(is_empty, jnp.zeros_like(old), old))
            plgpu.commit_smem()
        return tuple(found)

    def _write(self, place: Place, state: State) -> None:
        """Hand out the state behind the row."""
        targets = self._pieces(self.rows.write[place.row], place)
        for piece, target in zip(state, targets, strict=True):
            self._hand_out(piece, target)

    def _hand_out(self, x: jax.Array, target: Any) -> None:
        """Write a matrix [64, COLUMNS] to global memory."""
        self._stage(x)
        plgpu.copy_smem_to_gmem(self.shared.staged, target)

    def _stage(self, x: jax.Array) -> None:
        """Write a matrix to the buffer on the way to global memory."""
        # The copy of the matrix before has to have read the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.shared.staged[...] = x
        plgpu.commit_smem()

    def _block(self, place: Place, nth: Scalar, state: State) -> State:
        """Answer the queries of the row's nth block, and return the state behind it.

        See `chunked._block`; a product with rows that are scaled is scaled itself.
        """
        buffers, full, _, work, staged, _ = self.shared
        give_back = partial(self._fetcher.give_back, place, nth)
        first, second = (work.at[piece] for piece in (0, 1))
        for buffer, piece in zip((first, second), state, strict=True):
            store(buffer, piece)
        change, last, to_end = self._change(place, nth)
        store(first, change)
        store(second, change * to_end)
        plgpu.barrier_wait(full.scores)
        added = product((each(buffers.scores), each(first)))
        answers = plgpu.load(staged, layout=WGMMA) + added
        give_back("scores")
        block = self.rows.first[place.row] + nth
        self._hand_out(answers, self.out.at[block, :, place.head, place.columns])
        kept = jnp.exp(last)
        after = tuple(
            old * kept + product((turned(buffers.key.at[piece]), each(second)))
            for piece, old in enumerate(state)
        )
        give_back("key")
        return after

    def _change(self, place: Place, nth: Scalar) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return what a block's tokens add along their keys, and decays.

        These are the logarithm of that of the whole block, and the factor from each token to the
        block's end. What the state answers to the queries is left in `staged`.
        """
        buffers, full, _, work, _, _ = self.shared
        give_back = partial(self._fetcher.give_back, place, nth)
        size = self.rows.size[place.row] - nth * BLOCK
        plgpu.barrier_wait(full.key)
        # Keys behind the row's end are those of another row, or NaN.
        pl.when(size < BLOCK)(partial(_clear, buffers.key, size))
        known = _times(buffers.key, work)
        plgpu.barrier_wait(full.query)
        asked = _times(buffers.query, work)
        give_back("query")

        plgpu.barrier_wait(full.rates)
        total = wide(buffers.rates.at[0], 1)
        writing = wide(buffers.rates.at[1], 1)
        last = buffers.rates[0, BLOCK - 1]
        upto = jnp.exp(total)
        # There, for want of registers.
        self._stage(asked * upto)
        plgpu.barrier_wait(full.value)
        value = plgpu.load(buffers.value, layout=WGMMA)
        wrong = jnp.where(_inside(size), writing * (value - known * upto), 0.0)
        store(work.at[0], wrong)
        # What was read into registers has been committed by now, and may be overwritten.
        give_back("rates", "value")
        plgpu.barrier_wait(full.inverse)
        change = product((each(buffers.inverse), each(work.at[0])))
        give_back("inverse")
        return change, last, jnp.exp(last - total)


def _times(x: Any, y: Any) -> jax.Array:
    """Return the product of x [d / 64, PARTS, 64, 64] and y [d / 64, PARTS, 64, COLUMNS]."""
    pieces = range(x.shape[0])
    return product(*((each(x.at[piece]), each(y.at[piece])) for piece in pieces))


def _inside(size: Scalar) -> jax.Array:
    """Return whether each row of a matrix belongs to one of the block's tokens."""
    return plgpu.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 0, layout=WGMMA) < size


def _clear(key: Any, size: Scalar) -> None:
    """Zero the keys behind the block's tokens: they are summed over."""
    pieces = key.shape[0]

    def one(nth: Scalar, _: None) -> None:
        numbers = key.at[lax.rem(nth, pieces), lax.div(nth, pieces)]
        old = plgpu.load(numbers, layout=WGMMA)
        numbers[...] = jnp.where(_inside(size), old, jnp.zeros_like(old))

    lax.fori_loop(0, pieces * PARTS, one, None)
    plgpu.commit_smem()
