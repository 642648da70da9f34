"""Body of the TPU kernel: a step of its grid walks tiles over blocks of pages.

Blocks are fetched one ahead of the block that is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.paged_attention.lanes import sublanes
from jaxserve.pallas_kernels.paged_attention.tpu_plan import Plan

# Score of a masked position. It is finite, since in a block that is masked throughout the peak is
# this score too, and -inf - -inf would be NaN.
MASKED = -1e30
Scalar = jax.Array | int
Refs = Mapping[str, Any]


class Scalars(NamedTuple):
    """Arrays in scalar memory for all steps of the grid; n is the number of tiles."""

    tables: Any  # [R * W] pages
    row: Any  # [n] the tile's row
    first: Any  # [n] position of the tile's first query
    count: Any  # [n] number of queries
    live: Any  # [1] number of tiles with queries
    insert: Any  # [n] 1 where the kernel itself stores the tile's only token, else 0


class Span(NamedTuple):
    """Positions that a tile's queries see, from `begin` to `last`."""

    begin: Scalar
    last: Scalar

    @staticmethod
    def of(first: Scalar, count: Scalar, window: int | None) -> "Span":
        """Return the span of `count` queries from position `first` on."""
        # 0 * first: a zero of the type and shape of `first`, which benchmarks pass as an array.
        begin = 0 * first if window is None else jnp.maximum(first - window + 1, 0)
        return Span(begin, first + count - 1)

    def range_in(self, size: int) -> tuple[Scalar, Scalar]:
        """Return the range of pages, or of blocks, of this size that overlap the span.

        The end of the range is exclusive.
        """
        return self.begin // size, self.last // size + 1


@dataclass(frozen=True)
class Body:
    """A step of the kernel's grid, with its memory references by name.

    The grid goes over steps of tiles and, as the faster dimension, over groups of k kv heads;
    `ins`, `outs` and `work` hold a group's heads, `pools` all heads. Rows of results that belong to
    no tile's tokens are not written.
    """

    plan: Plan
    scalars: Scalars
    # q [per_step, k, M, C], sinks [k, M, 1], new [per_step, k, 1, C] float32,
    # new_k_scale and new_v_scale [per_step, k, 1, 1]
    ins: Refs
    outs: Refs  # out [per_step, k, M, V], lse [per_step, k, M, 1]
    pools: Refs  # k, k_scale, v_scale, in HBM
    work: Refs  # memory on the chip, among it two blocks of each pool

    def run(self) -> None:
        """Attend from the step's live tiles."""
        live = self.scalars.live[0]
        head = pl.program_id(1)

        # Every later block is fetched while the one before it is computed.
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
        """Return the positions that the tile's queries see."""
        return Span.of(self.scalars.first[tile], self.scalars.count[tile], self.plan.options.window)

    def _of_heads(self, group: Scalar) -> Any:
        """Return the slice of kv heads of a group."""
        heads = self.plan.heads
        return pl.ds(group * heads, heads)

    def _copies(self, tile: Scalar, group: Scalar, block: Scalar, slot: Scalar, what: str) -> None:
        """Start, or wait for, the copies of the pages of a block that the tile's queries see.

        `what` is "start" or "wait". A wait has to name the same copies as the start.
        """
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

        # A block at an end of the span has pages that no query sees; they are not copied.
        begin = jnp.maximum(first, block * per_block)
        stop = jnp.minimum(end, (block + 1) * per_block)
        lax.fori_loop(begin, stop, one, None)

    # ---- a tile

    def _attend(self, tile: Scalar, nth: Scalar) -> None:
        """Attend from a tile; of a tile with one token, compute only that token's rows."""
        plan = self.plan
        is_few = self.scalars.count[tile] == 1
        if plan.tokens == 1:
            return self._walk(tile, nth, plan.rows)

        # The number of rows is static, so the walk is compiled twice.

        @pl.when(is_few)
        def _() -> None:
            self._walk(tile, nth, plan.groups)

        @pl.when(~is_few)
        def _() -> None:
            self._walk(tile, nth, plan.rows)

    def _walk(self, tile: Scalar, nth: Scalar, rows: int) -> None:
        """Walk over the tile's blocks, and write the results of the first `rows` of its M rows."""
        span = self._span(tile)
        group = pl.program_id(1)
        begin, end = span.range_in(self.plan.block_tokens)
        self._start(rows)

        def block_step(block: Scalar, _: None) -> None:
            # Which of the two buffers is next carries over between tiles and grid steps, since the
            # number of blocks of a tile is known to the device alone.
            slot = self.work["slot"][0]
            # Copies of the next block start before this one's are awaited, so that they run while
            # this one is computed.
            self._fetch_next(tile, group, block, end, 1 - slot)
            self._copies(tile, group, block, slot, "wait")
            self.work["slot"][0] = 1 - slot

            # The new token's query sees the token itself, so it has to be in the block by now.
            @pl.when((block == end - 1) & (self.scalars.insert[tile] > 0))
            def _() -> None:
                self._insert(tile, nth, span.last, slot)

            # Only the first and the last block reach beyond the span. With scales, a dead
            # position's weight and value are cleared in `_attend_block` instead.
            if not self.plan.options.layout.scaled:

                @pl.when((block == begin) | (block == end - 1))
                def _() -> None:
                    self._clear(span, block, slot)

            for head in range(self.plan.heads):
                self._attend_block(tile, nth, head, rows, span, block, slot)

        lax.fori_loop(begin, end, block_step, None)

        # The next tile that inserts reuses the buffers that are written from.
        @pl.when(self.scalars.insert[tile] > 0)
        def _() -> None:
            for copy in self._writes(tile, span.last):
                copy.wait()

        self._finish(tile, nth, rows)

    def _fetch_next(
        self, tile: Scalar, group: Scalar, block: Scalar, end: Scalar, slot: Scalar
    ) -> None:
        """Start to fetch the block that is computed after this one.

        The next block is the tile's next; after its last, the first of its next group of heads; and
        after the last group, the first of the next tile.
        """
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
        """Zero the keys and values of a block's positions that no query of the tile sees.

        The positions may hold NaN, and 0 x NaN is NaN.
        """
        for head in range(self.plan.heads):
            kept = self.work["k"][slot, head]
            dead = self._dead(span, block, kept.shape, 0)
            self.work["k"][slot, head] = jnp.where(dead, jnp.zeros_like(kept), kept)

    def _dead(self, span: Span, block: Scalar, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Return which of the block's positions none of the tile's queries sees."""
        position = block * self.plan.block_tokens + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (position < span.begin) | (position > span.last)

    # ---- the softmax

    def _start(self, rows: int) -> None:
        """Reset the running softmax.

        A sink is a score that precedes all others and has no value: the peak starts as the sink,
        the denominator as exp(0) = 1.
        """
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
        """Update the running softmax of a head with a block (FlashAttention-2)."""
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
        # Scores of keys that are not seen may be NaN; they are replaced, never multiplied.
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
            # Among 8-bit numbers only floating-point ones have a NaN, which a byte that was never
            # written may be.
            if jnp.issubdtype(options.layout.dtype, jnp.floating):
                values = jnp.where(
                    self._dead(span, block, values.shape, 0), jnp.zeros_like(values), values
                )
        acc_ref[...] = acc_ref[...] * decay + _product(weights.astype(queries.dtype), values, 0)

    def _scale(self, name: str, slot: Scalar, head: int) -> jax.Array:
        """Return the scales of a block's tokens, [1, S]."""
        held = self.work[name]
        pages = [held[slot, page, head] for page in range(self.plan.block_pages)]
        return jnp.concatenate(pages, axis=1)

    def _tokens(self, rows: int) -> jax.Array:
        """Return, for each row of a tile, the number of its token: [M, 1].

        TPUs have no integer division; half a row is added so that rounding cannot reach a lower
        token.
        """
        row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0).astype(jnp.float32)
        return ((row + 0.5) * (1 / self.plan.groups)).astype(jnp.int32)

    def _seen(self, tile: Scalar, block: Scalar, rows: int) -> jax.Array:
        """Return which positions of the block each row's query sees, [M, S]."""
        token = self._tokens(rows)
        window = self.plan.options.window
        query = jnp.where(token < self.scalars.count[tile], self.scalars.first[tile] + token, -1)
        key = block * self.plan.block_tokens + lax.broadcasted_iota(
            jnp.int32, (rows, self.plan.block_tokens), 1
        )
        return (key <= query) if window is None else (key <= query) & (key > query - window)

    def _finish(self, tile: Scalar, nth: Scalar, rows: int) -> None:
        """Write the tile's results: the weighted values over the denominator, and its logarithm."""
        for head in range(self.plan.heads):
            total = self.work["total"][head, :rows][:, :1]
            total = jnp.where(total == 0, 1.0, total)  # NaN stays, so that it is noticed
            out = self.outs["out"].at[nth, head, :rows]
            out[...] = (self.work["acc"][head, :rows] / total).astype(out.dtype)
            if "lse" in self.outs:
                self.outs["lse"][nth, head, :rows] = self.work["peak"][head, :rows][
                    :, :1
                ] + jnp.log(total)

    # ---- the new token of a row with one token

    def _insert(self, tile: Scalar, nth: Scalar, position: Scalar, slot: Scalar) -> None:
        """Put the tile's only token into the block, and start to write it back to its page.

        Its scales and the rows around it, up to whole tiles of memory, are written as well.
        """
        plan = self.plan
        step = sublanes(plan.options.layout.dtype)
        held = self.work["k"]
        page_nth = position // plan.page_size
        place = position % plan.page_size
        # Copies begin and end at whole tiles of memory, so the token's neighbours are written too.
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
        """Return the copies that write a token at this position back to its page."""
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
    """Return the slice of `count` rows from `begin` on, which is a multiple of `count`."""
    return pl.ds(pl.multiple_of(begin, count), count)


def _product(a: jax.Array, b: jax.Array, contracted: int) -> jax.Array:
    """Return the product of a [M, n] with b in float32, over b's dimension `contracted`.

    float32 operands are multiplied at full precision.
    """
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)
