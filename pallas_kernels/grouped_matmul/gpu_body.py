"""What a thread block of the Hopper kernel does: one warpgroup fetches, the others multiply, up to 64 rows each.

Thread block c of C takes units c, c + C, ... of as many as there are. The warpgroup that fetches is ahead of the others
by as many stages as shared memory has room for, also from unit to unit, so that copies never pause for the end of one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.gpu_plan import DEPTH, STAGED_COLUMNS, Plan
from pallas_kernels.hopper import WARPGROUP_ROWS

TOGETHER = 8  # blocks of rows that take turns with a tile of columns, so that an expert's are near each other in time
REGISTERS, FETCHING_REGISTERS, MOST_REGISTERS = 512, 56, 232  # of every thread of all warpgroups; of those that fetch

Scalar = Any  # an int32, of the program or known before it


class Given(NamedTuple):
    """In global memory."""

    experts: Any  # [n]
    live: Any  # [1]
    x: Any  # [M, K]
    weight: Any  # [E, C, K, N]


class Shared(NamedTuple):
    """In shared memory: s stages, w warpgroups that multiply."""

    x: Any  # [s, w * 64, DEPTH]; rows behind the block are never written, and never handed out
    weight: Any  # [s, DEPTH, columns]
    out: Any  # [w * 64, STAGED_COLUMNS]
    full: Any  # [s]
    free: Any  # [s]


class Unit(NamedTuple):
    expert: Scalar
    part: Scalar
    row: Scalar  # the first
    column: Scalar
    done: Scalar  # stages of this thread block's units before


@dataclass(frozen=True)
class Body:
    plan: Plan
    given: Given
    out: Any  # [M, C, N] in global memory
    shared: Shared

    def run(self) -> None:
        warpgroup, multiplying = lax.axis_index("warpgroup"), self.plan.warpgroups

        @pl.when(warpgroup == multiplying)
        def _() -> None:
            if multiplying > 1:
                plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")
            self._wait_for_buffers(self._every_unit(self._fetch))

        @pl.when(warpgroup < multiplying)
        def _() -> None:
            if multiplying > 1:
                left = (REGISTERS - FETCHING_REGISTERS) // multiplying // 8 * 8
                plgpu.set_max_registers(min(left, MOST_REGISTERS), action="increase")
            self._every_unit(self._multiply)
            plgpu.wait_smem_to_gmem(0)

    # ---- units

    def _every_unit(self, work: Callable[[Unit], None]) -> Scalar:
        """How many stages that were."""
        first, blocks = lax.axis_index("block"), lax.axis_size("block")
        live = self.given.live[0]
        mine = lax.div(live * (self.plan.tiles * self.plan.parts) - first + blocks - 1, jnp.int32(blocks))
        lax.fori_loop(0, mine, lambda nth, _: work(self._unit(first + nth * blocks, nth * self.plan.steps, live)), None)
        return mine * self.plan.steps

    def _unit(self, nth: Scalar, done: Scalar, live: Scalar) -> Unit:
        """Of a group of blocks all with the first tile, then all with the second: their rows stay in the L2 cache, and
        an expert's blocks want its tile at the same time.
        """
        plan, tiles = self.plan, self.plan.tiles * self.plan.parts
        first = lax.div(nth, jnp.int32(TOGETHER * tiles)) * TOGETHER
        size, within = jnp.minimum(live - first, TOGETHER), nth - first * tiles
        block, tile = first + lax.rem(within, size), lax.div(within, size)
        return Unit(
            self.given.experts[block],
            lax.div(tile, jnp.int32(plan.tiles)),
            pl.multiple_of(block * plan.block, plan.block),
            pl.multiple_of(lax.rem(tile, jnp.int32(plan.tiles)) * plan.columns, plan.columns),
            done,
        )

    def _slot(self, unit: Unit, step: Scalar) -> Scalar:
        return lax.rem(unit.done + step, jnp.int32(self.plan.stages))

    # ---- the warpgroup that fetches

    def _fetch(self, unit: Unit) -> None:
        """What lies behind the last row and column of a weight comes as zeros."""
        given, shared, plan = self.given, self.shared, self.plan

        def one(step: Scalar, _: None) -> None:
            slot = self._slot(unit, step)
            _wait_if(unit.done + step >= plan.stages, shared.free.at[slot])
            depth = pl.ds(pl.multiple_of(step * DEPTH, DEPTH), DEPTH)
            x = given.x.at[pl.ds(unit.row, plan.block), depth]
            weight = given.weight.at[unit.expert, unit.part, depth, pl.ds(unit.column, plan.columns)]
            plgpu.copy_gmem_to_smem(weight, shared.weight.at[slot], shared.full.at[slot])
            plgpu.copy_gmem_to_smem(x, shared.x.at[slot, pl.ds(0, plan.block)], shared.full.at[slot])

        lax.fori_loop(0, plan.steps, one, None)

    def _wait_for_buffers(self, done: Scalar) -> None:
        """Until all are free again: the interpreter wants every arrival at a barrier to be noticed."""
        for slot in range(self.plan.stages):
            _wait_if(done > slot, self.shared.free.at[slot])

    # ---- those that multiply

    @property
    def _rows(self) -> Any:
        """This warpgroup's."""
        return pl.ds(pl.multiple_of(lax.axis_index("warpgroup") * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)

    def _multiply(self, unit: Unit) -> None:
        shared, plan = self.shared, self.plan

        def start(sums: Any, step: Scalar) -> None:
            slot = self._slot(unit, step)
            plgpu.barrier_wait(shared.full.at[slot])
            plgpu.wgmma(sums, shared.x.at[slot, self._rows], shared.weight.at[slot])

        def multiply(sums: Any) -> jax.Array:
            start(sums, 0)

            def one(step: Scalar, _: None) -> None:
                start(sums, step)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(shared.free.at[self._slot(unit, step - 1)])

            lax.fori_loop(1, plan.steps, one, None)
            return sums[...]

        sums = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, plan.columns), jnp.float32))
        plgpu.barrier_arrive(shared.free.at[self._slot(unit, plan.steps - 1)])
        self._hand_out(unit, sums)

    def _hand_out(self, unit: Unit, sums: jax.Array) -> None:
        """Columns behind the last one are dropped."""
        used = min(self.plan.block, WARPGROUP_ROWS)
        first = pl.multiple_of(lax.axis_index("warpgroup") * used, used)
        for column in range(0, self.plan.columns, STAGED_COLUMNS):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was handed out before
            staged = self.shared.out.at[self._rows]
            staged[...] = sums[:, column : column + STAGED_COLUMNS].astype(staged.dtype)
            plgpu.commit_smem()
            columns = pl.ds(pl.multiple_of(unit.column + column, STAGED_COLUMNS), STAGED_COLUMNS)
            there = self.out.at[pl.ds(pl.multiple_of(unit.row + first, used), used), unit.part, columns]
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, used)], there)


def _wait_if(condition: Scalar, barrier: Any) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))
