"""What the TPU kernel does in a step of its grid: walk tiles over blocks of pages, one block ahead
of itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.lanes import sublanes
from pallas_kernels.paged_attention.tpu_plan import Plan

MASKED = -1e30  # not -inf: a fully masked block must give exp(0), not exp(nan)
Scalar = jax.Array | int
Refs = Mapping[str, Any]


class Scalars(NamedTuple):
    """In scalar memory, for all steps of the grid; n tiles."""

    tables: Any  # [R * W]
    row: Any  # [n]
    first: Any  # [n] position of the first query
    count: Any  # [n] of queries
    live: Any  # [1] tiles with queries
    insert: Any  # [n] whether the tile's token is put into its page


class Span(NamedTuple):
    """The positions that a tile's queries see: the first, and the last."""

    begin: Scalar
    last: Scalar

    @staticmethod
    def of(first: Scalar, count: Scalar, window: int | None) -> "Span":
        """Of so many queries from position `first` on."""
        begin = 0 * first if window is None else jnp.maximum(first - window + 1, 0)
        return Span(begin, first + count - 1)

    def range_in(self, size: int) -> tuple[Scalar, Scalar]:
        """The first of the pages, or blocks, of this size that have any of them, and the one behind
        the last.
        """
        return self.begin // size, self.last // size + 1


@dataclass(frozen=True)
class Body:
    """Refs by name, k of the K kv heads in each. ins: q [per_step, k, M, C], sinks [k, M, 1], new
    [per_step, k, 1, C] float32 and new_k_scale, new_v_scale [per_step, k, 1, 1]; outs: out
    [per_step, k, M, V], lse [per_step, k, M, 1]; pools: k, k_scale, v_scale, all of them, in HBM;
    work: what lies on the chip, two blocks of each pool among it.

    The grid goes over steps of tiles and, faster, over groups of k kv heads. Rows of results whose
    tokens are no tile's are left as they are.
    """

    plan: Plan
    scalars: Scalars
    ins: Refs
    outs: Refs
    pools: Refs
    work: Refs

    def run(self) -> None:
        live = self.scalars.live[0]
        head = pl.program_id(1)

        @pl.when((pl.program_id(0) == 0) & (head == 0) & (live > 0))
        def _() -> None:
            self.work["slot"][0] = 0
            self._copies(0, 0, self._span(0).begin // self.plan.block_tokens, 0, "start")

        def one(nth: Scalar, _: None) -> None:
            tile = pl.program_id(0) * self.plan.per_step + nth

            @pl.when(tile < live)
            def _() -> None:
                self._attend(tile, nth)

        lax.fori_loop(0, self.plan.per_step, one, None)

    # ---- copies

    def _span(self, tile: Scalar) -> Span:
        return Span.of(self.scalars.first[tile], self.scalars.count[tile], self.plan.options.window)

    def _of_heads(self, group: Scalar) -> Any:
        heads = self.plan.heads
        return pl.ds(group * heads, heads)

    def _copies(self, tile: Scalar, group: Scalar, block: Scalar, slot: Scalar, what: str) -> None:
        """Start, or wait for, the copies of the block's pages that the tile's queries see."""
        plan = self.plan
        first, end = self._span(tile).range_in(self.plan.page_size)
        size = plan.page_size
        per_block = plan.block_pages
        heads = self._of_heads(group)

        def one(number: Scalar, _: None) -> None:
            page = self.scalars.tables[self.scalars.row[tile] * plan.table_width + number]
            nth = number - block * per_block
            for name, pool in self.pools.items():
                into = self.work[name].at[slot]
                place = into.at[:, _rows(nth * size, size)] if name == "k" else into.at[nth]
                copy = pltpu.make_async_copy(
                    pool.at[page, heads], place, self.work["arrived"].at[slot]
                )
                getattr(copy, what)()

        begin = jnp.maximum(first, block * per_block)
        stop = jnp.minimum(end, (block + 1) * per_block)
        lax.fori_loop(begin, stop, one, None)

    # ---- a tile

    def _attend(self, tile: Scalar, nth: Scalar) -> None:
        """A tile with one token needs its first rows only."""
        plan = self.plan
        is_few = self.scalars.count[tile] == 1
        if plan.tokens == 1:
            return self._walk(tile, nth, plan.rows)

        @pl.when(is_few)
        def _() -> None:
            self._walk(tile, nth, plan.groups)

        @pl.when(~is_few)
        def _() -> None:
            self._walk(tile, nth, plan.rows)

    def _walk(self, tile: Scalar, nth: Scalar, rows: int) -> None:
        span = self._span(tile)
        group = pl.program_id(1)
        begin, end = span.range_in(self.plan.block_tokens)
        self._start(rows)

        def block_step(block: Scalar, _: None) -> None:
            slot = self.work["slot"][0]
            self._fetch_next(tile, group, block, end, 1 - slot)
            self._copies(tile, group, block, slot, "wait")
            self.work["slot"][0] = 1 - slot

            @pl.when((block == end - 1) & (self.scalars.insert[tile] > 0))
            def _() -> None:
                self._insert(tile, nth, span.last, slot)

            if not self.plan.options.layout.scaled:

                @pl.when((block == begin) | (block == end - 1))
                def _() -> None:
                    self._clear(span, block, slot)

            for head in range(self.plan.heads):
                self._attend_block(tile, nth, head, rows, span, block, slot)

        lax.fori_loop(begin, end, block_step, None)

        @pl.when(self.scalars.insert[tile] > 0)
        def _() -> None:
            for copy in self._writes(tile, span.last):
                copy.wait()

        self._finish(tile, nth, rows)

    def _fetch_next(
        self, tile: Scalar, group: Scalar, block: Scalar, end: Scalar, slot: Scalar
    ) -> None:
        """The tile's next block; or the first of its next heads; or the first of the next tile."""
        plan = self.plan
        live = self.scalars.live[0]
        is_last = block == end - 1
        groups = plan.options.layout.kv_heads // plan.heads
        is_last_group = group == groups - 1
        follower = jnp.where(is_last_group, jnp.minimum(tile + 1, live - 1), tile)

        @pl.when(~is_last)
        def _() -> None:
            self._copies(tile, group, block + 1, slot, "start")

        @pl.when(is_last & (~is_last_group | (tile + 1 < live)))
        def _() -> None:
            first = self._span(follower).begin // plan.block_tokens
            self._copies(follower, jnp.where(is_last_group, 0, group + 1), first, slot, "start")

    def _clear(self, span: Span, block: Scalar, slot: Scalar) -> None:
        """Zeros where nobody looks: there NaN may lie, and 0 x NaN is NaN."""
        for head in range(self.plan.heads):
            kept = self.work["k"][slot, head]
            dead = self._dead(span, block, kept.shape, 0)
            self.work["k"][slot, head] = jnp.where(dead, jnp.zeros_like(kept), kept)

    def _dead(self, span: Span, block: Scalar, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Which of the block's positions none of the tile's queries sees."""
        position = block * self.plan.block_tokens + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (position < span.begin) | (position > span.last)

    # ---- the softmax

    def _start(self, rows: int) -> None:
        """A sink is a score that comes before all others and has no value."""
        peak, total, acc = (self.work[name].at[:, :rows] for name in ("peak", "total", "acc"))
        acc[...] = jnp.zeros_like(acc)
        if "sinks" in self.ins:
            peak[...] = jnp.broadcast_to(self.ins["sinks"][:, :rows], peak.shape)
            total[...] = jnp.ones_like(total)
        else:
            peak[...] = jnp.full_like(peak, MASKED)
            total[...] = jnp.zeros_like(total)

    def _attend_block(
        self,
        tile: Scalar,
        nth: Scalar,
        head: int,
        rows: int,
        span: Span,
        block: Scalar,
        slot: Scalar,
    ) -> None:
        options = self.plan.options
        lanes = self.plan.lanes
        queries = self.ins["q"][nth, head, :rows]
        held = self.work["k"]
        keys = held[slot, head, :, : lanes.keys].astype(queries.dtype)
        scores = _product(queries, keys, 1) * options.scale
        if "k_scale" in self.work:
            scores = scores * self._scale("k_scale", slot, head)
        if options.softcap is not None:
            scores = options.softcap * jnp.tanh(scores / options.softcap)
        seen = self._seen(tile, block, rows)
        scores = jnp.where(seen, scores, MASKED)
        peak_ref, total_ref, acc_ref = (
            self.work[name].at[head, :rows] for name in ("peak", "total", "acc")
        )
        before = peak_ref[:, :1]
        peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - peak), 0.0)
        decay = jnp.exp(before - peak)
        peak_ref[...] = jnp.broadcast_to(peak, peak_ref.shape)
        total_ref[...] = total_ref[...] * decay + jnp.sum(weights, axis=1, keepdims=True)
        values = held[slot, head, :, lanes.values : lanes.values + lanes.value_lanes].astype(
            queries.dtype
        )
        if options.layout.scaled:
            scale = self._scale("v_scale" if "v_scale" in self.work else "k_scale", slot, head)
            weights = weights * jnp.where(self._dead(span, block, scale.shape, 1), 0.0, scale)
            if jnp.issubdtype(
                options.layout.dtype, jnp.floating
            ):  # a byte that nobody wrote may be a NaN too
                values = jnp.where(
                    self._dead(span, block, values.shape, 0), jnp.zeros_like(values), values
                )
        acc_ref[...] = acc_ref[...] * decay + _product(weights.astype(queries.dtype), values, 0)

    def _scale(self, name: str, slot: Scalar, head: int) -> jax.Array:
        """[1, S]"""
        held = self.work[name]
        pages = [held[slot, page, head] for page in range(self.plan.block_pages)]
        return jnp.concatenate(pages, axis=1)

    def _tokens(self, rows: int) -> jax.Array:
        """[M, 1]: of which of the tile's tokens a row is. Chips divide no integers."""
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0).astype(jnp.float32)
        return ((row + 0.5) * (1 / self.plan.groups)).astype(jnp.int32)

    def _seen(self, tile: Scalar, block: Scalar, rows: int) -> jax.Array:
        """[M, S]"""
        token = self._tokens(rows)
        window = self.plan.options.window
        query = jnp.where(token < self.scalars.count[tile], self.scalars.first[tile] + token, -1)
        key = block * self.plan.block_tokens + lax.broadcasted_iota(
            jnp.int32, (rows, self.plan.block_tokens), 1
        )
        return (key <= query) if window is None else (key <= query) & (key > query - window)

    def _finish(self, tile: Scalar, nth: Scalar, rows: int) -> None:
        for head in range(self.plan.heads):
            total = self.work["total"][head, :rows][:, :1]
            total = jnp.where(total == 0, 1.0, total)  # NaN stays: somebody has to notice
            out = self.outs["out"].at[nth, head, :rows]
            out[...] = (self.work["acc"][head, :rows] / total).astype(out.dtype)
            if "lse" in self.outs:
                self.outs["lse"][nth, head, :rows] = self.work["peak"][head, :rows][
                    :, :1
                ] + jnp.log(total)

    # ---- the new token of a row that has one

    def _insert(self, tile: Scalar, nth: Scalar, position: Scalar, slot: Scalar) -> None:
        """Put it into the block, and start to write the rows around it, and its scales, back to its
        page.
        """
        plan = self.plan
        step = sublanes(plan.options.layout.dtype)
        held = self.work["k"]
        page_nth = position // plan.page_size
        place = position % plan.page_size
        base = place // step * step
        in_block = (page_nth % plan.block_pages) * plan.page_size + base
        around = _rows(in_block, step)
        for head in range(plan.heads):
            old = held[slot, head, around].astype(jnp.float32)
            here = lax.broadcasted_iota(jnp.int32, old.shape, 0) == place - base
            new = jnp.broadcast_to(self.ins["new"][nth, head], old.shape)
            merged = jnp.where(here, new, old).astype(held.dtype)
            held[slot, head, around] = self.work["new_k"][head] = merged
        for name in self.pools:
            if name != "k":
                old = self.work[name][slot, page_nth % plan.block_pages]
                here = lax.broadcasted_iota(jnp.int32, old.shape, 2) == place
                new = jnp.broadcast_to(self.ins[f"new_{name}"][nth], old.shape)
                merged = jnp.where(here, new, old)
                self.work[name][slot, page_nth % plan.block_pages] = self.work[f"new_{name}"][
                    ...
                ] = merged
        for copy in self._writes(tile, position):
            copy.start()

    def _writes(self, tile: Scalar, position: Scalar) -> list[Any]:
        plan = self.plan
        step = sublanes(plan.options.layout.dtype)
        base = position % plan.page_size // step * step
        page = self.scalars.tables[
            self.scalars.row[tile] * plan.table_width + position // plan.page_size
        ]
        heads = self._of_heads(pl.program_id(1))
        copies = []
        for name, pool in self.pools.items():
            of_page = pool.at[page, heads]
            there = of_page.at[:, _rows(base, step)] if name == "k" else of_page
            copies.append(
                pltpu.make_async_copy(self.work[f"new_{name}"], there, self.work["written"])
            )
        return copies


def _rows(begin: Any, count: int) -> Any:
    """So many from there on; begin: a multiple of that."""
    return pl.ds(pl.multiple_of(begin, count), count)


def _product(a: jax.Array, b: jax.Array, contracted: int) -> jax.Array:
    """a [M, n] with b, whose dimension `contracted` is n, in float32; float32 operands at full
    precision.
    """
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)
