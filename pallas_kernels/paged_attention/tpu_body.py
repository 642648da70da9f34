"""What the TPU kernel does in a step of its grid: walk tiles over blocks of pages, one block ahead of itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.api import Options
from pallas_kernels.paged_attention.lanes import Lanes, sublanes

MASKED = -1e30  # not -inf: a fully masked block must give exp(0), not exp(nan)
Scalar = jax.Array
Refs = Mapping[str, Any]


class Plan(NamedTuple):
    """What the code depends on beside its operands' shapes."""

    options: Options
    lanes: Lanes
    block_pages: int
    per_step: int  # tiles per step of the grid
    tile_tokens: int
    table_width: int

    @property
    def page_size(self) -> int:
        return self.options.layout.page_size

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.page_size


class Scalars(NamedTuple):
    """In scalar memory, for all steps of the grid; n tiles."""

    tables: Any  # [R * W]
    row: Any  # [n]
    first: Any  # [n] position of the first query
    count: Any  # [n] of queries
    live: Any  # [1] tiles with queries
    insert: Any  # [n] whether the tile's token is put into its page


class Span(NamedTuple):
    """The positions that a tile's queries see, from..to and both included."""

    begin: Scalar
    last: Scalar


@dataclass(frozen=True)
class Body:
    """Refs by name. ins: q [per_step, K, M, C], sinks [K, M, 1], new [per_step, K, C] float32 and new_k_scale,
    new_v_scale [per_step, K, 1]; outs: out [per_step, K, M, V], lse [per_step, K, M, 1]; pools: k, k_scale, v_scale,
    in HBM; work: what lies on the chip, two blocks of each pool among it.
    """

    plan: Plan
    scalars: Scalars
    ins: Refs
    outs: Refs
    pools: Refs
    work: Refs

    def run(self) -> None:
        live = self.scalars.live[0]

        @pl.when((pl.program_id(0) == 0) & (live > 0))
        def _() -> None:
            self.work["slot"][0] = 0
            self._fetch(0, self._span(0).begin // self.plan.block_tokens, 0)

        def one(nth: Scalar, _: None) -> None:
            tile = pl.program_id(0) * self.plan.per_step + nth

            @pl.when(tile < live)
            def _() -> None:
                self._attend(tile, nth)

            @pl.when(tile >= live)
            def _() -> None:
                self.outs["out"][nth] = jnp.zeros_like(self.outs["out"][nth])
                if "lse" in self.outs:
                    self.outs["lse"][nth] = jnp.full_like(self.outs["lse"][nth], -jnp.inf)

        lax.fori_loop(0, self.plan.per_step, one, None)

    # ---- copies

    def _span(self, tile: Scalar) -> Span:
        first, window = self.scalars.first[tile], self.plan.options.window
        begin = jnp.int32(0) if window is None else jnp.maximum(first - window + 1, 0)
        return Span(begin, first + self.scalars.count[tile] - 1)

    def _copies(self, tile: Scalar, block: Scalar, slot: Scalar, what: str) -> None:
        """Start, or wait for, the copies of the block's pages that the tile's queries see."""
        plan, span = self.plan, self._span(tile)
        size, per_block = plan.page_size, plan.block_pages
        first = jnp.maximum(span.begin // size, block * per_block)
        end = jnp.minimum(span.last // size + 1, (block + 1) * per_block)

        def one(number: Scalar, _: None) -> None:
            page = self.scalars.tables[self.scalars.row[tile] * plan.table_width + number]
            nth = number - block * per_block
            for name, pool in self.pools.items():
                into = self.work[name]
                place = into.at[slot, :, pl.ds(pl.multiple_of(nth * size, size), size)] if name == "k" else into.at[slot, nth]
                getattr(pltpu.make_async_copy(pool.at[page], place, self.work["arrived"].at[slot]), what)()

        lax.fori_loop(first, end, one, None)

    def _fetch(self, tile: Scalar, block: Scalar, slot: Scalar) -> None:
        self._copies(tile, block, slot, "start")

    # ---- a tile

    def _attend(self, tile: Scalar, nth: Scalar) -> None:
        span, size = self._span(tile), self.plan.block_tokens
        begin, end = span.begin // size, span.last // size + 1
        self._start()

        def block_step(block: Scalar, _: None) -> None:
            slot = self.work["slot"][0]
            self._fetch_next(tile, block, end, 1 - slot)
            self._copies(tile, block, slot, "wait")
            self.work["slot"][0] = 1 - slot
            if "new" in self.ins:

                @pl.when((block == end - 1) & (self.scalars.insert[tile] > 0))
                def _() -> None:
                    self._insert(tile, nth, span.last, slot)

            if not self.plan.options.layout.scaled:

                @pl.when((block == begin) | (block == end - 1))
                def _() -> None:
                    self._clear(span, block, slot)

            for head in range(self.plan.options.layout.kv_heads):
                self._attend_block(tile, nth, head, span, block, slot)

        lax.fori_loop(begin, end, block_step, None)
        if "new" in self.ins:

            @pl.when(self.scalars.insert[tile] > 0)
            def _() -> None:
                for copy in self._writes(tile, span.last):
                    copy.wait()

        self._finish(tile, nth)

    def _fetch_next(self, tile: Scalar, block: Scalar, end: Scalar, slot: Scalar) -> None:
        """The tile's next block, or the first of the next tile."""
        live, is_last = self.scalars.live[0], block == end - 1
        follower = jnp.minimum(tile + 1, live - 1)

        @pl.when(~is_last)
        def _() -> None:
            self._fetch(tile, block + 1, slot)

        @pl.when(is_last & (tile + 1 < live))
        def _() -> None:
            self._fetch(follower, self._span(follower).begin // self.plan.block_tokens, slot)

    def _clear(self, span: Span, block: Scalar, slot: Scalar) -> None:
        """Zeros where nobody looks: there NaN may lie, and 0 x NaN is NaN."""
        for head in range(self.plan.options.layout.kv_heads):
            kept = self.work["k"][slot, head]
            dead = self._dead(span, block, kept.shape, 0)
            self.work["k"][slot, head] = jnp.where(dead, jnp.zeros_like(kept), kept)

    def _dead(self, span: Span, block: Scalar, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Which of the block's positions none of the tile's queries sees."""
        position = block * self.plan.block_tokens + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (position < span.begin) | (position > span.last)

    # ---- the softmax

    def _start(self) -> None:
        """A sink is a score that comes before all others and has no value."""
        peak, total, acc = (self.work[name] for name in ("peak", "total", "acc"))
        acc[...] = jnp.zeros_like(acc)
        if "sinks" in self.ins:
            peak[...] = jnp.broadcast_to(self.ins["sinks"][...], peak.shape)
            total[...] = jnp.ones_like(total)
        else:
            peak[...] = jnp.full_like(peak, MASKED)
            total[...] = jnp.zeros_like(total)

    def _attend_block(self, tile: Scalar, nth: Scalar, head: int, span: Span, block: Scalar, slot: Scalar) -> None:
        options, lanes = self.plan.options, self.plan.lanes
        queries, held = self.ins["q"][nth, head], self.work["k"]
        keys = held[slot, head, :, : lanes.keys].astype(queries.dtype)
        scores = _product(queries, keys, 1) * options.scale
        if "k_scale" in self.work:
            scores = scores * self._scale("k_scale", slot, head)
        if options.softcap is not None:
            scores = options.softcap * jnp.tanh(scores / options.softcap)
        seen = self._seen(tile, block, scores.shape)
        scores = jnp.where(seen, scores, MASKED)
        peak_ref, total_ref, acc_ref = (self.work[name] for name in ("peak", "total", "acc"))
        before = peak_ref[head][:, :1]
        peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - peak), 0.0)
        decay = jnp.exp(before - peak)
        peak_ref[head] = jnp.broadcast_to(peak, peak_ref.shape[1:])
        total_ref[head] = total_ref[head] * decay + jnp.sum(weights, axis=1, keepdims=True)
        values = held[slot, head, :, lanes.values : lanes.values + lanes.value_lanes].astype(queries.dtype)
        if options.layout.scaled:
            name = "v_scale" if "v_scale" in self.work else "k_scale"
            scale = self._scale(name, slot, head)
            weights = weights * jnp.where(self._dead(span, block, scale.shape, 1), 0.0, scale)
            if jnp.issubdtype(options.layout.dtype, jnp.floating):  # a byte that nobody wrote may be a NaN too
                values = jnp.where(self._dead(span, block, values.shape, 0), jnp.zeros_like(values), values)
        acc_ref[head] = acc_ref[head] * decay + _product(weights.astype(queries.dtype), values, 0)

    def _scale(self, name: str, slot: Scalar, head: int) -> jax.Array:
        """[1, S]"""
        held = self.work[name]
        pages = [held[slot, page, head : head + 1] for page in range(self.plan.block_pages)]
        return jnp.concatenate(pages, axis=1)

    def _seen(self, tile: Scalar, block: Scalar, shape: tuple[int, ...]) -> jax.Array:
        """Query g * tile_tokens + t of the rows is of the tile's token t."""
        token = lax.broadcasted_iota(jnp.int32, shape, 0) & (self.plan.tile_tokens - 1)
        query = self.scalars.first[tile] + token
        key = block * self.plan.block_tokens + lax.broadcasted_iota(jnp.int32, shape, 1)
        seen = (key <= query) & (token < self.scalars.count[tile])
        window = self.plan.options.window
        return seen if window is None else seen & (key > query - window)

    def _finish(self, tile: Scalar, nth: Scalar) -> None:
        out = self.outs["out"]
        shape = out.shape[2:]
        token = lax.broadcasted_iota(jnp.int32, shape, 0) & (self.plan.tile_tokens - 1)
        mine = token < self.scalars.count[tile]
        for head in range(self.plan.options.layout.kv_heads):
            total = self.work["total"][head][:, :1]
            total = jnp.where(total == 0, 1.0, total)  # NaN stays: somebody has to notice
            out[nth, head] = jnp.where(mine, self.work["acc"][head] / total, 0.0).astype(out.dtype)
            if "lse" in self.outs:
                self.outs["lse"][nth, head] = self.work["peak"][head][:, :1] + jnp.log(total)

    # ---- the new token of a decode step

    def _insert(self, tile: Scalar, nth: Scalar, position: Scalar, slot: Scalar) -> None:
        """Put it into the block, and start to write the rows around it, and its scales, back to its page."""
        plan = self.plan
        rows, step, held = plan.options.layout.kv_heads, sublanes(plan.options.layout.dtype), self.work["k"]
        page_nth, place = position // plan.page_size, position % plan.page_size
        base = place // step * step
        in_block = (page_nth % plan.block_pages) * plan.page_size + base
        around = pl.ds(pl.multiple_of(in_block, step), step)
        for head in range(rows):
            old = held[slot, head, around].astype(jnp.float32)
            here = lax.broadcasted_iota(jnp.int32, old.shape, 0) == place - base
            new = jnp.broadcast_to(self.ins["new"][nth, head : head + 1], old.shape)
            merged = jnp.where(here, new, old).astype(held.dtype)
            held[slot, head, around] = self.work["new_k"][head] = merged
        for name in self.pools:
            if name != "k":
                old = self.work[name][slot, page_nth % plan.block_pages]
                here = lax.broadcasted_iota(jnp.int32, old.shape, 1) == place
                new = jnp.broadcast_to(self.ins[f"new_{name}"][nth], old.shape)
                merged = jnp.where(here, new, old)
                self.work[name][slot, page_nth % plan.block_pages] = self.work[f"new_{name}"][...] = merged
        for copy in self._writes(tile, position):
            copy.start()

    def _writes(self, tile: Scalar, position: Scalar) -> list[Any]:
        plan = self.plan
        step = sublanes(plan.options.layout.dtype)
        base = position % plan.page_size // step * step
        page = self.scalars.tables[self.scalars.row[tile] * plan.table_width + position // plan.page_size]
        copies = []
        for name, pool in self.pools.items():
            there = pool.at[page, :, pl.ds(pl.multiple_of(base, step), step)] if name == "k" else pool.at[page]
            copies.append(pltpu.make_async_copy(self.work[f"new_{name}"], there, self.work["written"]))
        return copies


def _product(a: jax.Array, b: jax.Array, contracted: int) -> jax.Array:
    """a [M, n] with b, whose dimension `contracted` is n, in float32; float32 operands at full precision."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)
