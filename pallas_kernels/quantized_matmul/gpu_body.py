"""Body of the Hopper kernel: one warpgroup fetches, the others multiply, 64 columns each.

Thread block c of C takes units c, c + C, ... of all. The warpgroup that fetches is ahead of the
others by as many stages as shared memory has room for, also from unit to unit. The others take
turns on the tensor cores: while one multiplies, the other's numbers become bfloat16, and its
products are scaled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.quantized_matmul.gpu_plan import WARPGROUPS, Plan

# Registers of a thread, out of 512 for each thread index of all warpgroups together.
FETCHING_REGISTERS = 56
MULTIPLYING_REGISTERS = 224

Scalar = Any  # an int32: a value of the kernel, or a constant


class Inputs(NamedTuple):
    """Operands in global memory."""

    x: Any  # [T, K]
    numbers: Any  # [N, K]
    scales: Any  # [G, N]


class Shared(NamedTuple):
    """Buffers and barriers in shared memory: s stages."""

    x: Any  # [s, rows, depth]
    numbers: Any  # [s, columns, depth]
    scales: Any  # [s, depth / g, columns]
    out: Any  # [columns, staged rows]
    # Barriers. "full": copies into the buffers have landed; "free": they may be overwritten.
    full: Any  # [s]
    free: Any  # [s]


class Unit(NamedTuple):
    """A tile of columns times a tile of rows, over one split of K."""

    split: Scalar
    column: Scalar  # the first
    row: Scalar  # the first
    begin: Scalar  # the first of its steps, among those of all of K
    steps: Scalar  # how many
    done: Scalar  # stages that this thread block's units before have used


@dataclass(frozen=True)
class Body:
    """Work of one thread block; each of its warpgroups runs `run`."""

    plan: Plan
    inputs: Inputs
    out: Any  # [splits, N, T] in global memory
    shared: Shared

    def run(self) -> None:
        """Fetch or multiply, according to the warpgroup, until all units are done."""
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")
            self._wait_for_buffers(self._every_unit(self._fetch))

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
            self._every_unit(self._multiply)
            # Shared memory must stay until the last results have left it.
            plgpu.wait_smem_to_gmem(0)

    # ---- units

    def _every_unit(self, work: Callable[[Unit], None]) -> Scalar:
        """Do `work` for every unit of this thread block; return the number of stages used."""
        first = lax.axis_index("block")
        blocks = lax.axis_size("block")
        mine = lax.div(self.plan.units - first + blocks - 1, jnp.int32(blocks))

        def one(nth: Scalar, done: Scalar) -> Scalar:
            unit = self._unit(first + nth * blocks, done)
            work(unit)
            return done + unit.steps

        return lax.fori_loop(0, mine, one, jnp.int32(0))

    def _unit(self, nth: Scalar, done: Scalar) -> Unit:
        """Return the nth of all units.

        The tiles of rows that want a tile of columns follow each other, so that it stays in the L2
        cache.
        """
        plan = self.plan
        tile = lax.div(nth, jnp.int32(plan.row_tiles))
        split = jnp.int32(0)
        if plan.splits > 1:
            split = lax.div(tile, jnp.int32(plan.column_tiles))
            tile = lax.rem(tile, jnp.int32(plan.column_tiles))
        begin = lax.div(split * plan.steps, jnp.int32(plan.splits))
        return Unit(
            split,
            pl.multiple_of(tile * plan.columns, plan.columns),
            pl.multiple_of(lax.rem(nth, jnp.int32(plan.row_tiles)) * plan.rows, plan.rows),
            begin,
            lax.div((split + 1) * plan.steps, jnp.int32(plan.splits)) - begin,
            done,
        )

    def _slot(self, unit: Unit, step: Scalar) -> Scalar:
        """Return the stage of a unit's step; stages are used in turn, across units."""
        return lax.rem(unit.done + step, jnp.int32(self.plan.stages))

    # ---- the warpgroup that fetches

    def _fetch(self, unit: Unit) -> None:
        """Fetch a unit; what lies behind the last row and column arrives as zeros."""
        inputs = self.inputs
        shared = self.shared
        plan = self.plan
        columns = pl.ds(unit.column, plan.columns)

        def one(step: Scalar, _: None) -> None:
            slot = self._slot(unit, step)
            at = unit.begin + step
            _wait_if(unit.done + step >= plan.stages, shared.free.at[slot])
            depth = pl.ds(pl.multiple_of(at * plan.depth, plan.depth), plan.depth)
            groups = pl.ds(at * plan.scales, plan.scales)
            full = shared.full.at[slot]
            plgpu.copy_gmem_to_smem(
                inputs.numbers.at[columns, depth], shared.numbers.at[slot], full
            )
            plgpu.copy_gmem_to_smem(inputs.scales.at[groups, columns], shared.scales.at[slot], full)
            plgpu.copy_gmem_to_smem(
                inputs.x.at[pl.ds(unit.row, plan.rows), depth], shared.x.at[slot], full
            )

        lax.fori_loop(0, unit.steps, one, None)

    def _wait_for_buffers(self, done: Scalar) -> None:
        """Wait until all buffers are free again, after `done` stages.

        The interpreter wants every arrival at a barrier to be awaited.
        """
        for slot in range(self.plan.stages):
            _wait_if(done > slot, self.shared.free.at[slot])

    # ---- those that multiply

    @property
    def _columns(self) -> Any:
        """Return the slice of a tile's columns that this warpgroup multiplies."""
        return pl.ds(
            pl.multiple_of(lax.axis_index("warpgroup") * WARPGROUP_ROWS, WARPGROUP_ROWS),
            WARPGROUP_ROWS,
        )

    def _multiply(self, unit: Unit) -> None:
        """Sum a unit's scaled products over K, and write the result."""
        plan = self.plan
        shared = self.shared

        def one(step: Scalar, sums: jax.Array) -> jax.Array:
            slot = self._slot(unit, step)
            plgpu.barrier_wait(shared.full.at[slot])
            weight = self._widened(slot)
            for nth in range(plan.scales):
                depth = slice(nth * plan.group, (nth + 1) * plan.group)
                product = self._product(
                    weight[:, depth], shared.x.at[slot, :, pl.ds(depth.start, plan.group)]
                )
                scales = plgpu.load(
                    shared.scales.at[slot, nth, self._columns], layout=plgpu.Layout.WGMMA.reduce(1)
                )
                sums = sums + product * lax.broadcast_in_dim(scales, product.shape, [0])
            # What was read into registers has to be read before a bulk copy, which is another proxy
            # of memory, overwrites it.
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.free.at[slot])
            return sums

        zeros = plgpu.layout_cast(
            jnp.zeros((WARPGROUP_ROWS, plan.rows), jnp.float32), plgpu.Layout.WGMMA
        )
        self._hand_out(unit, lax.fori_loop(0, unit.steps, one, zeros))

    def _widened(self, slot: Scalar) -> jax.Array:
        """Return this warpgroup's numbers of a stage as bfloat16 [64, depth], in registers.

        Numbers are read eight at a time, and moved between threads while they are small.
        """
        packed = plgpu.load(
            self.shared.numbers.at[slot, self._columns], layout=plgpu.Layout.WGMMA_UPCAST_4X
        )
        return plgpu.layout_cast(packed, plgpu.Layout.WGMMA).astype(jnp.bfloat16)

    def _product(self, weight: jax.Array, x: Any) -> jax.Array:
        """Return weight [64, g] times the transposed x [rows, g], in float32."""

        def multiply(sums: Any) -> jax.Array:
            plgpu.wgmma(sums, weight, x.T)
            return sums[...]

        return pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, self.plan.rows), jnp.float32)
        )

    def _hand_out(self, unit: Unit, sums: jax.Array) -> None:
        """Write a unit's result; rows and columns behind the last one are dropped."""
        wide = self.plan.staged
        first = lax.axis_index("warpgroup") * WARPGROUP_ROWS
        for row in range(0, self.plan.rows, wide):
            # The copy of the rows before has to have read the buffer.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged = self.shared.out.at[self._columns]
            staged[...] = sums[:, row : row + wide]
            plgpu.commit_smem()
            columns = pl.ds(pl.multiple_of(unit.column + first, WARPGROUP_ROWS), WARPGROUP_ROWS)
            rows = pl.ds(pl.multiple_of(unit.row + row, wide), wide)
            plgpu.copy_smem_to_gmem(staged, self.out.at[unit.split, columns, rows])


def _wait_if(condition: Scalar, barrier: Any) -> None:
    """Wait at a barrier if the condition holds."""
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))
