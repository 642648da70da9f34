"""Copies of pages and queries into shared memory, for the Hopper kernel."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.gpu_plan import Plan
from jaxserve.pallas_kernels.paged_attention.gpu_refs import Inputs, Scalar, Shared, Unit

# Pieces of a block, each within one page: the page, and the first token within it.
Pieces = tuple[tuple[Scalar, Scalar], ...]
CHUNK = 64  # positions, and dimensions, that are held in registers at a time


@dataclass(frozen=True)
class Fetcher:
    """Copies that fill a thread block's buffers, from the warpgroup that issues them."""

    plan: Plan
    inputs: Inputs
    shared: Shared

    def fetch(self, unit: Unit) -> None:
        """Fetch all blocks of a unit, each as soon as its buffers are free."""
        shared = self.shared
        stages = self.plan.stages

        def block(i: Scalar, pieces: Pieces) -> Pieces:
            slot = self.slot(unit, i)
            reused = unit.done + i >= stages
            # The table is read one block ahead, so that no copy waits for it.
            ahead = self.pieces(unit, i + 1)
            _wait_if(reused, shared.k_free.at[slot])
            self.copy_block(self.inputs.k, pieces, unit, shared.k.at[slot], shared.k_full.at[slot])
            if not self.plan.is_latent:
                _wait_if(reused, shared.v_free.at[slot])
                self.copy_block(
                    self.inputs.v, pieces, unit, shared.v.at[slot], shared.v_full.at[slot]
                )
            self._copy_queries_after(unit, i)
            return ahead

        lax.fori_loop(0, unit.blocks, block, self.pieces(unit, 0))

    def fetch_and_convert(self, unit: Unit) -> None:
        """Fetch all blocks of a unit of 8-bit pages.

        Numbers are copied ahead, and become bfloat16 as soon as the buffers for that are free.
        """
        inputs = self.inputs
        shared = self.shared
        raw = self.shared.raw
        stages = self.plan.stages
        assert raw is not None

        def copy(i: Scalar) -> None:
            pieces = self.pieces(unit, i)
            slot = self.slot(unit, i)
            for pool, scales, buffer, scale_buffer, landed in (
                (inputs.k, inputs.k_scale, raw.k, raw.k_scale, raw.k_landed),
                (inputs.v, inputs.v_scale, raw.v, raw.v_scale, raw.v_landed),
            ):
                self.copy_block(pool, pieces, unit, buffer.at[slot], landed.at[slot])
                self.copy_block(scales, pieces, unit, scale_buffer.at[slot], landed.at[slot])

        for i in range(stages):
            pl.when(i < unit.blocks)(partial(copy, i))

        @pl.loop(0, unit.blocks)
        def _(i: Scalar) -> None:
            slot = self.slot(unit, i)
            reused = unit.done + i >= stages
            for numbers, scales, landed, target, free, full in (
                (raw.k, raw.k_scale, raw.k_landed, shared.k, shared.k_free, shared.k_full),
                (raw.v, raw.v_scale, raw.v_landed, shared.v, shared.v_free, shared.v_full),
            ):
                plgpu.barrier_wait(landed.at[slot])
                _wait_if(reused, free.at[slot])
                _convert(numbers.at[slot], scales.at[slot], target.at[slot])
                plgpu.barrier_arrive(full.at[slot])
            self._copy_queries_after(unit, i)
            pl.when(i + stages < unit.blocks)(partial(copy, i + stages))

    def _copy_queries_after(self, unit: Unit, i: Scalar) -> None:
        """Copy the unit's queries once the copies into all buffers have started.

        Queries have a single buffer and so must wait for the unit before to end; pages need not.
        """

        @pl.when(i == jnp.minimum(self.plan.stages, unit.blocks) - 1)
        def _() -> None:
            _wait_if(unit.number > 0, self.shared.q_free)
            self._copy_queries(unit)

    def wait_for_buffers(self, done: Scalar) -> None:
        """Wait until all buffers are free again, after `done` blocks.

        The interpreter wants every arrival at a barrier to be awaited.
        """
        for slot in range(self.plan.stages):
            _wait_if(done > slot, self.shared.k_free.at[slot])
            if not self.plan.is_latent:
                _wait_if(done > slot, self.shared.v_free.at[slot])
        _wait_if(done > 0, self.shared.q_free)

    def fetch_first(self, unit: Unit) -> None:
        """Start to fill all buffers, and copy the queries, in a warpgroup that then multiplies."""
        for i in range(self.plan.stages):
            pl.when(i < unit.blocks)(partial(self._fetch_both, unit, i))
        self._copy_queries(unit)

    def _fetch_both(self, unit: Unit, i: int) -> None:
        """Start to copy the keys and values of the unit's i-th block."""
        shared = self.shared
        pieces = self.pieces(unit, i)
        slot = self.slot(unit, i)
        self.copy_block(self.inputs.k, pieces, unit, shared.k.at[slot], shared.k_full.at[slot])
        self.copy_block(self.inputs.v, pieces, unit, shared.v.at[slot], shared.v_full.at[slot])

    def pieces(self, unit: Unit, i: Scalar) -> Pieces:
        """Return the pieces of the unit's i-th block; beyond its last piece, that one again."""
        size = self.plan.piece_tokens
        page = jnp.int32(self.plan.options.layout.page_size)
        wanted = (
            unit.begin + i * self.plan.block_tokens + j
            for j in range(0, self.plan.block_tokens, size)
        )
        # Every copy of a block is awaited, so the number of pieces is fixed; the last piece is
        # repeated, which exists and is masked.
        held = [jnp.minimum(position, unit.end - size) for position in wanted]
        return tuple(
            (self.inputs.tables[unit.row, lax.div(at, page)], lax.rem(at, page)) for at in held
        )

    def copy_block(self, pool: Any, pieces: Pieces, unit: Unit, buffer: Any, full: Any) -> None:
        """Copy pieces of a pool [P, K, Z, ...] into a buffer [B, ...]; `full` counts arrivals."""
        size = self.plan.piece_tokens
        for j, (page, offset) in enumerate(pieces):
            piece = pool.at[
                page,
                lax.div(unit.head, jnp.int32(self.plan.sharing)),
                pl.ds(pl.multiple_of(offset, size), size),
            ]
            plgpu.copy_gmem_to_smem(piece, buffer.at[pl.ds(j * size, size)], full)

    def _copy_queries(self, unit: Unit) -> None:
        """Copy the query rows of the unit's tile and head."""
        tile = lax.div(unit.place, jnp.int32(self.plan.splits))
        rows = self.shared.q.at[pl.ds(0, self.plan.rows)]
        plgpu.copy_gmem_to_smem(self.inputs.q.at[tile, unit.head], rows, self.shared.q_full)

    def slot(self, unit: Unit, i: Scalar) -> Scalar:
        """Return the buffer of the unit's i-th block; buffers are used in turn, across units."""
        return lax.rem(unit.done + i, jnp.int32(self.plan.stages))


def _convert(numbers: Any, scales: Any, target: Any) -> None:
    """Write 8-bit numbers times their token's scale into target [B, H].

    Positions that no query sees may hold anything; `Body._clear` zeroes their values.
    """
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    # In chunks, for want of registers.
    for row, column in product(*(range(0, size, CHUNK) for size in target.shape)):
        part = pl.ds(row, CHUNK), pl.ds(column, CHUNK)
        some = plgpu.load(numbers.at[part], layout=layout).astype(jnp.float32)
        scale = plgpu.load(scales.at[part[0]], layout=layout.reduce(1))
        wide = some * lax.broadcast_in_dim(scale, some.shape, [0])
        target[part] = plgpu.layout_cast(wide.astype(target.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()


def _wait_if(condition: Scalar, barrier: Any) -> None:
    """Wait at a barrier if the condition holds."""
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))
