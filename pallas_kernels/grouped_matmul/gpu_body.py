"""Body of the Hopper kernel: one warpgroup fetches, the others multiply, up to 64 rows each.

Thread block c of C takes units c, c + C, ... of all. The warpgroup that fetches is ahead of the
others by as many stages as shared memory has room for, also from unit to unit, so that copies do
not pause at the end of a unit. Tiles of a weight in 8 bits become bfloat16 in that warpgroup as
they arrive; sums are multiplied by the scales of their columns when they are written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.grouped_matmul.gpu_plan import DEPTH, STAGED_COLUMNS, Plan
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS

# Blocks of rows that take turns with a tile of columns, so that an expert's blocks are near each
# other in time.
TOGETHER = 8
# A multiprocessor has 64 Ki registers: 512 for each thread index of its warpgroups together.
REGISTERS = 512
MOST_REGISTERS = 232  # of a thread that multiplies
FETCHING_REGISTERS = 56  # of a thread that fetches
CONVERTING_REGISTERS = 104  # of a thread that fetches and converts
CHUNK = 64  # numbers of a column, and columns, that are converted together

Scalar = Any  # an int32: a value of the kernel, or a constant


class Inputs(NamedTuple):
    """Operands in global memory."""

    experts: Any  # [n]
    live: Any  # [1]
    x: Any  # [M, K]
    weight: Any  # [E, C, K, N]
    scales: Any = None  # [E, C, 1, N], of a weight in 8 bits


class Shared(NamedTuple):
    """Buffers and barriers in shared memory: s stages, w warpgroups that multiply."""

    # [s, w * 64, DEPTH]; rows behind the block are never written, and their products never used.
    x: Any
    weight: Any  # [s, DEPTH, columns]
    out: Any  # [w * 64, STAGED_COLUMNS]
    # Barriers. "full": copies into the buffers have landed; "free": they may be overwritten.
    full: Any  # [s]
    free: Any  # [s]
    raw: "Raw | None" = None


class Raw(NamedTuple):
    """A weight in 8 bits as it was copied, in shared memory."""

    weight: Any  # [s, DEPTH, columns]
    landed: Any  # [s] barriers
    scales: Any  # [columns] of one unit
    scales_full: Any
    scales_free: Any


class Unit(NamedTuple):
    """A block of rows times a tile of columns."""

    expert: Scalar
    part: Scalar
    row: Scalar  # the first
    column: Scalar  # the first
    done: Scalar  # stages that this thread block's units before have used


@dataclass(frozen=True)
class Body:
    """Work of one thread block; each of its warpgroups runs `run`."""

    plan: Plan
    inputs: Inputs
    out: Any  # [M, C, N] in global memory
    shared: Shared

    def run(self) -> None:
        """Fetch or multiply, according to the warpgroup, until all units are done."""
        warpgroup = lax.axis_index("warpgroup")
        multiplying = self.plan.warpgroups

        @pl.when(warpgroup == multiplying)
        def _() -> None:
            if multiplying > 1:
                plgpu.set_max_registers(self._fetching_registers, action="decrease")
            if self.plan.converts:
                self._wait_for_buffers(self._fetch_and_convert())
            else:
                self._wait_for_buffers(self._every_unit(self._fetch))

        @pl.when(warpgroup < multiplying)
        def _() -> None:
            if multiplying > 1:
                # What the fetcher leaves, shared out evenly; the hardware wants multiples of 8.
                left = (REGISTERS - self._fetching_registers) // multiplying // 8 * 8
                plgpu.set_max_registers(min(left, MOST_REGISTERS), action="increase")
            self._every_unit(self._multiply)
            # Shared memory must stay until the last results have left it.
            plgpu.wait_smem_to_gmem(0)

    @property
    def _fetching_registers(self) -> int:
        """Return the registers of a thread that fetches."""
        return CONVERTING_REGISTERS if self.plan.converts else FETCHING_REGISTERS

    # ---- units

    def _every_unit(self, work: Callable[[Unit], None]) -> Scalar:
        """Do `work` for every unit of this thread block; return the number of stages used."""
        mine = self._mine()
        lax.fori_loop(0, mine, lambda nth, _: work(self._of_mine(nth)), None)
        return mine * self.plan.steps

    def _mine(self) -> Scalar:
        """Return how many units this thread block has."""
        first = lax.axis_index("block")
        blocks = lax.axis_size("block")
        units = self.inputs.live[0] * (self.plan.tiles * self.plan.parts)
        return lax.div(units - first + blocks - 1, jnp.int32(blocks))

    def _of_mine(self, nth: Scalar) -> Unit:
        """Return this thread block's nth unit."""
        first = lax.axis_index("block")
        blocks = lax.axis_size("block")
        return self._unit(first + nth * blocks, nth * self.plan.steps, self.inputs.live[0])

    def _unit(self, nth: Scalar, done: Scalar, live: Scalar) -> Unit:
        """Return the nth of all units.

        A group of TOGETHER blocks takes the first tile of columns, then the second, and so on: the
        group's rows stay in the L2 cache, and an expert's blocks want its tile at the same time.
        """
        plan = self.plan
        tiles = self.plan.tiles * self.plan.parts
        first = lax.div(nth, jnp.int32(TOGETHER * tiles)) * TOGETHER
        size = jnp.minimum(live - first, TOGETHER)
        within = nth - first * tiles
        block = first + lax.rem(within, size)
        tile = lax.div(within, size)
        return Unit(
            self.inputs.experts[block],
            lax.div(tile, jnp.int32(plan.tiles)),
            pl.multiple_of(block * plan.block, plan.block),
            pl.multiple_of(lax.rem(tile, jnp.int32(plan.tiles)) * plan.columns, plan.columns),
            done,
        )

    def _slot(self, unit: Unit, step: Scalar) -> Scalar:
        """Return the stage of a unit's step; stages are used in turn, across units."""
        return lax.rem(unit.done + step, jnp.int32(self.plan.stages))

    # ---- the warpgroup that fetches

    def _fetch(self, unit: Unit) -> None:
        """Fetch a unit; what lies behind the last row and column of a weight arrives as zeros."""
        shared = self.shared

        def one(step: Scalar, _: None) -> None:
            slot = self._slot(unit, step)
            _wait_if(unit.done + step >= self.plan.stages, shared.free.at[slot])
            self._copy_weight(unit, step, shared.weight.at[slot], shared.full.at[slot])
            self._copy_rows(unit, step)

        lax.fori_loop(0, self.plan.steps, one, None)

    def _fetch_and_convert(self) -> Scalar:
        """Fetch all units of a weight in 8 bits; return the number of stages used.

        Weights are copied ahead, and become bfloat16 as soon as there is room for that.
        """
        shared = self.shared
        raw = self.shared.raw
        stages = self.plan.stages
        steps = self.plan.steps
        assert raw is not None
        total = self._mine() * steps

        def place(nth: Scalar) -> tuple[Unit, Scalar, Scalar]:
            """Return the unit, its step and the stage of the nth stage's work."""
            return (
                self._of_mine(lax.div(nth, jnp.int32(steps))),
                lax.rem(nth, jnp.int32(steps)),
                lax.rem(nth, stages),
            )

        def copy(nth: Scalar) -> None:
            unit, step, slot = place(nth)
            self._copy_weight(unit, step, raw.weight.at[slot], raw.landed.at[slot])

        def one(nth: Scalar, _: None) -> None:
            unit, step, slot = place(nth)
            _wait_if(nth >= stages, shared.free.at[slot])
            self._copy_rows(unit, step)
            # Scales have one buffer, which the unit before uses until its result is written; a unit
            # needs them at its end only.
            pl.when(step == steps - 1)(lambda: self._copy_scales(unit))
            plgpu.barrier_wait(raw.landed.at[slot])
            _convert(raw.weight.at[slot], shared.weight.at[slot])
            plgpu.barrier_arrive(shared.full.at[slot])
            pl.when(nth + stages < total)(lambda: copy(nth + stages))

        for nth in range(stages):
            pl.when(nth < total)(partial(copy, jnp.int32(nth)))
        lax.fori_loop(0, total, one, None)
        return total

    def _copy_weight(self, unit: Unit, step: Scalar, buffer: Any, full: Any) -> None:
        weight = self.inputs.weight.at[
            unit.expert, unit.part, _depth(step), pl.ds(unit.column, self.plan.columns)
        ]
        plgpu.copy_gmem_to_smem(weight, buffer, full)

    def _copy_rows(self, unit: Unit, step: Scalar) -> None:
        slot = self._slot(unit, step)
        block = self.plan.block
        rows = self.inputs.x.at[pl.ds(unit.row, block), _depth(step)]
        plgpu.copy_gmem_to_smem(
            rows, self.shared.x.at[slot, pl.ds(0, block)], self.shared.full.at[slot]
        )

    def _copy_scales(self, unit: Unit) -> None:
        raw = self.shared.raw
        assert raw is not None
        _wait_if(unit.done > 0, raw.scales_free)
        scales = self.inputs.scales.at[
            unit.expert, unit.part, 0, pl.ds(unit.column, self.plan.columns)
        ]
        plgpu.copy_gmem_to_smem(scales, raw.scales, raw.scales_full)

    def _wait_for_buffers(self, done: Scalar) -> None:
        """Wait until all buffers are free again, after `done` stages.

        The interpreter wants every arrival at a barrier to be awaited.
        """
        for slot in range(self.plan.stages):
            _wait_if(done > slot, self.shared.free.at[slot])
        if self.shared.raw:
            _wait_if(done > 0, self.shared.raw.scales_free)

    # ---- those that multiply

    @property
    def _rows(self) -> Any:
        """Return the slice of this warpgroup's rows in shared memory."""
        return pl.ds(
            pl.multiple_of(lax.axis_index("warpgroup") * WARPGROUP_ROWS, WARPGROUP_ROWS),
            WARPGROUP_ROWS,
        )

    def _multiply(self, unit: Unit) -> None:
        """Sum a unit's products over K, and write the result."""
        shared = self.shared
        plan = self.plan

        def start(sums: Any, step: Scalar) -> None:
            slot = self._slot(unit, step)
            plgpu.barrier_wait(shared.full.at[slot])
            plgpu.wgmma(sums, shared.x.at[slot, self._rows], shared.weight.at[slot])

        def multiply(sums: Any) -> jax.Array:
            start(sums, 0)

            def one(step: Scalar, _: None) -> None:
                start(sums, step)
                # All products but the last started are done, so the stage before is free.
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(shared.free.at[self._slot(unit, step - 1)])

            lax.fori_loop(1, plan.steps, one, None)
            return sums[...]

        sums = pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, plan.columns), jnp.float32)
        )
        plgpu.barrier_arrive(shared.free.at[self._slot(unit, plan.steps - 1)])
        self._hand_out(unit, sums)

    def _hand_out(self, unit: Unit, sums: jax.Array) -> None:
        """Write a unit's result; columns behind the last one are dropped."""
        raw = self.shared.raw
        if raw:
            plgpu.barrier_wait(raw.scales_full)
        for column in range(0, self.plan.columns, STAGED_COLUMNS):
            some = sums[:, column : column + STAGED_COLUMNS]
            write = partial(self._write, unit, column, some)
            # The copy of a result that has a single tile ignores which tile is asked for: zeros
            # from behind its last column would replace the result.
            if self.out.shape[-1] % self.plan.columns == 0:
                write()
            else:
                pl.when(unit.column + column < self.out.shape[-1])(write)
        if raw:
            plgpu.barrier_arrive(raw.scales_free)

    def _write(self, unit: Unit, column: int, some: jax.Array) -> None:
        """Write STAGED_COLUMNS columns of a unit's result, from its `column` on."""
        used = min(self.plan.block, WARPGROUP_ROWS)
        first = pl.multiple_of(lax.axis_index("warpgroup") * used, used)
        raw = self.shared.raw
        if raw:
            scales = plgpu.load(
                raw.scales.at[pl.ds(column, STAGED_COLUMNS)],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            some = some * lax.broadcast_in_dim(scales, some.shape, [1])
        # The copy of the columns before has to have read the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = self.shared.out.at[self._rows]
        staged[...] = some.astype(staged.dtype)
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(unit.column + column, STAGED_COLUMNS), STAGED_COLUMNS)
        there = self.out.at[pl.ds(pl.multiple_of(unit.row + first, used), used), unit.part, columns]
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, used)], there)


def _depth(step: Scalar) -> Any:
    """Return the slice of K of a step."""
    return pl.ds(pl.multiple_of(step * DEPTH, DEPTH), DEPTH)


def _convert(numbers: Any, target: Any) -> None:
    """Write [DEPTH, columns] of 8-bit numbers as the target's dtype, unscaled."""
    # In chunks, for want of registers.
    for column in range(0, target.shape[1], CHUNK):
        part = slice(None), pl.ds(column, CHUNK)
        some = plgpu.load(numbers.at[part], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        # The chip has no conversion from float8 to bfloat16.
        if jnp.issubdtype(some.dtype, jnp.floating):
            some = some.astype(jnp.float32)
        target[part] = plgpu.layout_cast(some.astype(target.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()


def _wait_if(condition: Scalar, barrier: Any) -> None:
    """Wait at a barrier if the condition holds."""
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))
