"""Body of the Hopper kernel: a thread block's walk over units of work.

The walk keeps FlashAttention-2's running softmax over blocks of pages. Thread block c of C takes
units c, c + C, ... of the list, every kv head being a unit of its own. The list is in the device's
memory, so that one captured graph serves rows of any lengths.

With few query rows one warpgroup does everything: it starts a block's copies as soon as the buffers
are free, and while it waits its neighbours on the multiprocessor compute. With many rows warpgroups
have 64 each and share keys and values, and one more warpgroup fetches (FlashAttention-3's division
of labour); it is ahead of the others by as many blocks as there are buffers, also from unit to
unit. Either way a block's key buffer is free once its scores are known, and its value buffer later.

Latent pages have one array, which is key and value. A value of 512 numbers would fill all registers
of a warpgroup, so two warpgroups share the same 64 rows: both compute the scores, and each adds up
half of the value's columns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.paged_attention.gpu_fetch import CHUNK, Fetcher
from jaxserve.pallas_kernels.paged_attention.gpu_plan import WARPGROUP_ROWS, Plan
from jaxserve.pallas_kernels.paged_attention.gpu_refs import Inputs, Outputs, Scalar, Shared, Unit

# A multiprocessor has 64 Ki registers: 512 for each thread index of its warpgroups together.
REGISTERS = 512
FETCHING_REGISTERS = 56  # of a thread of the warpgroup that fetches
# Start of a running peak. It is finite: scores that do not count are -inf, and exp2(-inf - peak)
# must be 0 and not NaN.
LOWEST = -1e30
LOG2E = math.log2(math.e)


class Running(NamedTuple):
    """Softmax so far of a warpgroup's 64 rows."""

    # Weighted sums of values, [64, columns] each; together V columns, or for latent pages the
    # columns of this warpgroup.
    acc: tuple[Any, ...]
    peak: Any  # [64] largest score, in units of log2
    total: Any  # [64] the denominator over exp2(peak)


@dataclass(frozen=True)
class Body:
    """Work of one thread block; each of its warpgroups runs `run`."""

    plan: Plan
    inputs: Inputs
    outputs: Outputs
    shared: Shared

    def run(self) -> None:
        """Fetch or attend, according to the warpgroup, until all units are done."""
        if not self.plan.has_fetcher:
            self._every_unit(self._fetch_and_attend)
            # Shared memory must stay until the last results have left it.
            plgpu.wait_smem_to_gmem(0)
            return
        warpgroup = lax.axis_index("warpgroup")
        fetcher = self._fetcher

        @pl.when(warpgroup == self.plan.warpgroups)
        def _() -> None:
            if self.plan.warpgroups > 1:
                plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")
            done = self._every_unit(
                fetcher.fetch if self.shared.raw is None else fetcher.fetch_and_convert
            )
            fetcher.wait_for_buffers(done)

        @pl.when(warpgroup < self.plan.warpgroups)
        def _() -> None:
            if self.plan.warpgroups > 1:
                # What the fetcher leaves, shared out evenly; the hardware wants multiples of 8.
                left = (REGISTERS - FETCHING_REGISTERS) // self.plan.warpgroups // 8 * 8
                plgpu.set_max_registers(min(left, 232), action="increase")
            self._every_unit(self._attend)
            plgpu.wait_smem_to_gmem(0)

    @property
    def _fetcher(self) -> Fetcher:
        """Return the fetcher of this thread block."""
        return Fetcher(self.plan, self.inputs, self.shared)

    def _fetch_and_attend(self, unit: Unit) -> None:
        """Do a unit in a warpgroup that fetches for itself."""
        self._fetcher.fetch_first(unit)
        self._attend(unit)

    def _every_unit(self, work: Callable[[Unit], None]) -> Scalar:
        """Do `work` for every unit of this thread block; return the number of blocks walked."""
        block = lax.axis_index("block")
        blocks = lax.axis_size("block")
        live = self.inputs.units.live[0] * self.plan.heads

        def one(number: Scalar, done: Scalar) -> Scalar:
            nth = block + number * blocks
            index = lax.div(nth, jnp.int32(self.plan.heads))
            head = lax.rem(nth, jnp.int32(self.plan.heads))
            row, first, count, begin, end, place = (ref[index] for ref in self.inputs.units[:-1])
            size = lax.div(
                end - begin + (self.plan.block_tokens - 1), jnp.int32(self.plan.block_tokens)
            )
            work(Unit(row, first, count, begin, end, place, head, number, done, size))
            return done + size

        return lax.fori_loop(0, lax.div(live - block + blocks - 1, blocks), one, jnp.int32(0))

    @property
    def _warpgroup(self) -> Scalar:
        """Return the number of this warpgroup among those that multiply."""
        return lax.axis_index("warpgroup") if self.plan.has_fetcher else jnp.int32(0)

    @property
    def _first_row(self) -> Scalar:
        """Return the first of this warpgroup's 64 rows of queries."""
        return 0 if self.plan.is_latent else self._warpgroup * WARPGROUP_ROWS

    def _columns(self, j: int) -> Any:
        """Return the slice of this warpgroup's j-th columns of values and results."""
        size = self.plan.result_columns
        return pl.ds(
            pl.multiple_of(self._warpgroup * size, size) if self.plan.is_latent else j * size, size
        )

    def _attend(self, unit: Unit) -> None:
        """Walk over a unit's blocks and write its result."""
        size = self.plan.block_tokens
        window = self.plan.options.window
        # Blocks inner_begin to inner_end - 1 are seen by all queries throughout: no mask is needed.
        inner_begin = jnp.int32(0)
        if window is not None:
            seen_by_all = unit.first + unit.count - window
            inner_begin = jnp.clip(
                lax.div(seen_by_all - unit.begin + size - 1, jnp.int32(size)), 0, unit.blocks
            )
        inner_end = jnp.clip(
            lax.div(unit.first + 1 - unit.begin, jnp.int32(size)), inner_begin, unit.blocks
        )

        def walk(border: bool) -> Callable[[Scalar, Running], Running]:
            return lambda i, running: self._block(unit, i, running, border)

        plgpu.barrier_wait(self.shared.q_full)
        running = self._nothing()
        if window is not None:
            running = lax.fori_loop(0, inner_begin, walk(True), running)
        running = lax.fori_loop(inner_begin, inner_end, walk(False), running)
        running = lax.fori_loop(inner_end, unit.blocks, walk(True), running)
        self._hand_out(unit, running)

    def _nothing(self) -> Running:
        """Return the running softmax before the first block."""
        each = plgpu.Layout.WGMMA.reduce(1)
        wide = self.plan.result_columns
        parts = self.plan.columns // self.plan.result_columns
        zeros = plgpu.layout_cast(
            jnp.zeros((WARPGROUP_ROWS, wide), jnp.float32), plgpu.Layout.WGMMA
        )
        return Running(
            (zeros,) * parts,
            plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), LOWEST, jnp.float32), each),
            plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), each),
        )

    def _block(self, unit: Unit, i: Scalar, running: Running, border: bool) -> Running:
        """Return the running softmax after the unit's i-th block.

        With `border`, some query does not see all of the block, so that scores are masked.
        """
        shared = self.shared
        slot = self._fetcher.slot(unit, i)
        # Pages of the block that comes into these buffers next: the table is read early, so that
        # the copy does not wait for it.
        later = () if self.plan.has_fetcher else self._fetcher.pieces(unit, i + self.plan.stages)

        def free(pool: Any, buffer: Any, full: Any, barrier: Any) -> None:
            """Free a buffer for the fetcher, or start to fill it again."""
            if self.plan.has_fetcher:
                plgpu.barrier_arrive(barrier.at[slot])
            else:
                copy = partial(
                    self._fetcher.copy_block, pool, later, unit, buffer.at[slot], full.at[slot]
                )
                pl.when(i + self.plan.stages < unit.blocks)(copy)

        begin = unit.begin + i * self.plan.block_tokens
        plgpu.barrier_wait(shared.k_full.at[slot])
        scores = self._scores(shared.k.at[slot])
        # The product has read the keys. A latent block is still wanted for its values.
        if not self.plan.is_latent:
            free(self.inputs.k, shared.k, shared.k_full, shared.k_free)
        if border:
            scores = jnp.where(self._seen(unit, begin, scores.shape), scores, -jnp.inf)
        peak = jnp.maximum(running.peak, scores.max(axis=1))
        decay = jnp.exp2(running.peak - peak)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(peak, scores.shape, [0]))
        total = running.total * decay + weights.sum(axis=1)
        acc = tuple(part * lax.broadcast_in_dim(decay, part.shape, [0]) for part in running.acc)
        if not self.plan.is_latent:
            plgpu.barrier_wait(shared.v_full.at[slot])
        if border:
            self._clear(unit, begin, slot)
        acc = self._add_values(acc, weights.astype(shared.v.dtype), shared.v.at[slot])
        if self.plan.is_latent:
            plgpu.barrier_arrive(shared.k_free.at[slot])
        else:
            free(self.inputs.v, shared.v, shared.v_full, shared.v_free)
        return Running(acc, peak, total)

    def _scores(self, keys: Any) -> jax.Array:
        """Return the scores of this warpgroup's rows with a block's keys, in units of log2."""
        options = self.plan.options
        shape = (WARPGROUP_ROWS, self.plan.block_tokens)
        queries = self.shared.q.at[pl.ds(self._first_row, WARPGROUP_ROWS)]

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, queries, keys.transpose((1, 0)))
            return acc[...]

        products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        if options.softcap is None:
            return products * (options.scale * LOG2E)
        # tanh(x) = 1 - 2 / (exp(2x) + 1). jnp.tanh would be the chip's instruction, which has only
        # 11 correct bits.
        twice = jnp.exp2(products * (2 * LOG2E * options.scale / options.softcap))
        return (1 - 2 / (twice + 1)) * (options.softcap * LOG2E)

    def _seen(self, unit: Unit, begin: Scalar, shape: tuple[int, ...]) -> jax.Array:
        """Return which positions of a block that begins at `begin` each row sees."""
        row = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1))
        query = unit.first - begin + lax.div(row + self._first_row, jnp.int32(self.plan.groups))
        query = lax.broadcast_in_dim(
            jnp.minimum(query, unit.first + unit.count - 1 - begin), shape, [0]
        )
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        seen = key <= query
        return (
            seen
            if self.plan.options.window is None
            else seen & (key > query - self.plan.options.window)
        )

    def _clear(self, unit: Unit, begin: Scalar, slot: Scalar) -> None:
        """Zero the values of positions that no query of the tile sees.

        The positions may hold NaN, and 0 x NaN is NaN.
        """
        values = self.shared.v.at[slot]
        window = self.plan.options.window

        def clear() -> None:
            shape = self.plan.block_tokens, self.plan.options.layout.out_dim
            # In chunks, for want of registers.
            for row, column in product(*(range(0, size, CHUNK) for size in shape)):
                some = values.at[pl.ds(row, CHUNK), pl.ds(column, CHUNK)]
                old = plgpu.load(some, layout=plgpu.Layout.WGMMA)
                position = (
                    begin
                    + row
                    + plgpu.broadcasted_iota(jnp.int32, old.shape, 0, layout=plgpu.Layout.WGMMA)
                )
                seen = position < unit.first + unit.count
                if window is not None:
                    seen = seen & (position > unit.first - window)
                some[...] = jnp.where(seen, old, jnp.zeros_like(old))
            plgpu.commit_smem()

        if self.plan.warpgroups == 1:
            clear()
            return

        # One warpgroup clears for all. The values of latent pages are their keys too, so it waits
        # until every warpgroup has its scores, and all wait for it.
        if self.plan.is_latent:
            plgpu.barrier_arrive(self.shared.scored.at[slot])

        @pl.when(self._warpgroup == 0)
        def _() -> None:
            if self.plan.is_latent:
                plgpu.barrier_wait(self.shared.scored.at[slot])
            clear()
            plgpu.barrier_arrive(self.shared.cleared.at[slot])

        plgpu.barrier_wait(self.shared.cleared.at[slot])

    def _add_values(self, acc: tuple[Any, ...], weights: jax.Array, values: Any) -> tuple[Any, ...]:
        """Return the sums with a block's values, weighted, added to them."""
        # The interpreter has no product of an operand in registers: it goes through memory.
        if self.shared.weights is not None:
            operand = self.shared.weights.at[self._warpgroup]
            operand[...] = weights
            plgpu.commit_smem()
            weights = operand
        return tuple(
            self._add_product(part, weights, values.at[:, self._columns(j)])
            for j, part in enumerate(acc)
        )

    def _add_product(self, acc: Any, weights: Any, values: Any) -> Any:
        """Return a sum plus the product of weights and values."""
        if self.shared.weights is None:  # the form for the chip
            return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(
                plgpu.WGMMAAccumulatorRef.init(acc)
            )

        def multiply(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, weights, values)
            return ref[...]

        return acc + pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32))

    def _hand_out(self, unit: Unit, running: Running) -> None:
        """Write a unit's result and its log-sum-exp.

        Rows that see nothing in this part get zeros, and LOWEST as the logarithm of nothing.
        """
        shared = self.shared
        rows = min(self.plan.rows, WARPGROUP_ROWS)
        some = jnp.where(
            running.total == 0, jnp.ones_like(running.total), running.total
        )  # NaN stays
        lse = running.peak * (1 / LOG2E) + jnp.log(some)
        results = [part / lax.broadcast_in_dim(some, part.shape, [0]) for part in running.acc]
        if self.plan.is_latent:
            self._hand_out_latent(unit, results[0], lse)
            return
        mine = pl.ds(self._first_row, WARPGROUP_ROWS)
        used = pl.ds(self._first_row, rows)
        staged = shared.q if shared.out is None else shared.out
        for j, result in enumerate(results):
            # The copy of the results before has to have read the buffer.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[mine] = result.astype(staged.dtype)
            if j == 0:
                shared.lse[mine] = lse
            plgpu.commit_smem()
            target = self.outputs.out.at[unit.place, unit.head, used, self._columns(j)]
            plgpu.copy_smem_to_gmem(staged.at[used], target)
            if j == 0:
                plgpu.copy_smem_to_gmem(
                    shared.lse.at[used], self.outputs.lse.at[unit.place, unit.head, used]
                )
        # Results that are staged where the queries were: the next queries must not overwrite them.
        if shared.out is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.plan.has_fetcher:
            plgpu.barrier_arrive(shared.q_free)

    def _hand_out_latent(self, unit: Unit, result: jax.Array, lse: jax.Array) -> None:
        """Write a latent unit's result from registers.

        There is no room in shared memory for so many columns; results in registers are written in
        float32.
        """
        self.outputs.out[unit.place, unit.head, :, self._columns(0)] = result

        @pl.when(self._warpgroup == 0)
        def _() -> None:
            self.outputs.lse[unit.place, unit.head] = lse

        plgpu.barrier_arrive(self.shared.q_free)
