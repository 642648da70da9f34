"""Paged attention in plain XLA: the reference of every kernel, and what runs on a CPU. Pages lie as
in `Pages`.

The attention walks over blocks of a row's pages with a running softmax (Milakov and Gimelshein
2018; FlashAttention-2's forward pass), and walks only as far as the longest row of the batch
reaches: a page table costs nothing for the width that nobody uses. A block beyond a row's length
changes none of its bits (it multiplies by 1 and adds 0), so a row does not feel how long its
neighbours are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.api import (
    Attended,
    Demand,
    KernelError,
    Layout,
    Options,
    Pages,
    Ragged,
    quantize,
)

MASKED = -1e30  # not -inf: a fully masked block must give exp(0), not exp(nan)
BLOCK_TOKENS = 64  # kv positions per iteration
TILE_TOKENS = 32  # query tokens of one row handled together in a ragged step


def check(options: Options, demand: Demand) -> None:
    """Any size will do, as long as query heads share kv heads evenly."""
    kv_heads = options.layout.kv_heads
    if demand.heads % kv_heads:
        raise KernelError(f"{demand.heads} query heads do not divide by {kv_heads} kv heads")


def axes(layout: Layout) -> Pages:
    scale = "PKZ" if layout.scaled else None
    if layout.value_dim is None:
        return Pages("PKZH", "PKZH", scale, scale)
    return Pages("P_ZH", None, scale and "P_Z", None)  # one head, for every shard


def allocate(num_pages: int, layout: Layout) -> Pages:
    """Zeroed arrays: unwritten memory may hold NaN, which a debugger would report."""

    def pool() -> tuple[jax.Array, jax.Array | None]:
        heads = (num_pages, layout.kv_heads, layout.page_size)
        scale = jnp.zeros(heads, jnp.float32) if layout.scaled else None
        return jnp.zeros((*heads, layout.head_dim), layout.dtype), scale

    k, k_scale = pool()
    v, v_scale = pool() if layout.value_dim is None else (None, None)
    return Pages(k, v, k_scale, v_scale)


def write(
    pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> Pages:
    """Store each token's k and v at (page, offset), in place when the pages are donated; page P
    drops the token.
    """
    num_pages, kv_heads, page_size, _ = pages.k.shape
    lonely = (
        kv_heads == len(page) == 1
    )  # XLA makes a select of a scatter of one row, and copies the pages for it
    if lonely:  # so there is a second one, to be dropped
        page = jnp.append(page, num_pages)
        offset = jnp.append(offset, 0)
    # One index into rows of H, since XLA:TPU lays a pool out anew for a scatter with three, and
    # back. But through a dimension of one XLA:CPU cannot reshape without a copy, and there no
    # compiler minds the three.
    rows = (page[:, None] * kv_heads + jnp.arange(kv_heads)[None]) * page_size + offset[:, None]
    view, where = (
        ((num_pages, 1, page_size), (page, 0, offset))
        if kv_heads == 1
        else ((-1,), (rows.reshape(-1),))
    )

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        values = new.reshape(-1, *new.shape[2:])
        values = jnp.concatenate([values, values]) if lonely else values
        return (
            pool.reshape(*view, *pool.shape[3:])
            .at[where]
            .set(values, mode="drop")
            .reshape(pool.shape)
        )

    return jax.tree.map(put, pages, _stored(pages, k, v))


def _stored(pages: Pages, k: jax.Array, v: jax.Array | None) -> Pages:
    """New tokens as the pages hold them: [T, K, H] of their dtype and scales [T, K]."""
    if pages.k_scale is None:
        return Pages(k.astype(pages.k.dtype), None if v is None else v.astype(pages.k.dtype))
    k, k_scale = quantize(k, pages.k.dtype)
    v, v_scale = (None, None) if v is None else quantize(v, pages.k.dtype)
    return Pages(k, v, k_scale, v_scale)


def read(pages: Pages, ids: Int[Array, "n"], layout: Layout) -> Pages:
    return jax.tree.map(lambda pool: pool[ids].swapaxes(1, 2), pages)


def write_back(pages: Pages, ids: Int[Array, "n"], canonical: Pages, layout: Layout) -> Pages:
    return jax.tree.map(
        lambda pool, x: pool.at[ids].set(x.swapaxes(1, 2), mode="drop"), pages, canonical
    )


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pages: Pages,
    ragged: Ragged,
    options: Options,
    sinks: Float[Array, "N"] | None = None,
) -> Attended:
    pages = write(pages, k, v, ragged.page, ragged.offset)
    heads = q.shape[1]
    no_sink = jnp.full(heads, MASKED) if sinks is None else sinks.astype(jnp.float32)
    attention = _decode if options.max_row_tokens == 1 else _ragged
    out, lse = attention(q, pages, ragged, options, no_sink)
    return Attended(out.astype(q.dtype), pages, lse if options.lse else None)


def _decode(
    q: jax.Array, pages: Pages, ragged: Ragged, options: Options, sinks: jax.Array
) -> tuple[Float[Array, "R N V"], Float[Array, "R N"]]:
    """One query per row, at position lengths - 1."""
    rows, heads, dim = q.shape
    kv_heads = options.layout.kv_heads
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    positions = jnp.broadcast_to((ragged.lengths - 1)[:, None], (rows, heads // kv_heads))
    out, lse = _flash(
        grouped, positions, pages, ragged.tables, options, sinks.reshape(kv_heads, -1)
    )
    return out.reshape(rows, heads, -1), lse.reshape(rows, heads)


class _Tiles(NamedTuple):
    """Accumulated results of a ragged step's tiles."""

    out: Float[Array, "T N V"]
    lse: Float[Array, "T N"]


def _ragged(
    q: jax.Array, pages: Pages, ragged: Ragged, options: Options, sinks: jax.Array
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """Works through tiles of TILE_TOKENS query tokens of one row, so that a row's result does not
    depend on where in the packing it lies.
    """
    num_tokens, heads, dim = q.shape
    kv_heads = options.layout.kv_heads
    starts = ragged.starts
    groups = heads // kv_heads
    tile = min(TILE_TOKENS, num_tokens)
    sizes = starts[1:] - starts[:-1]
    tile_ends = jnp.cumsum((sizes + tile - 1) // tile)
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))  # the last tile may reach past T
    tiled_sinks = jnp.tile(sinks.reshape(kv_heads, groups), tile)

    def ungrouped(x: jax.Array) -> jax.Array:
        """[1, K, tile * G, ...] -> [tile, N, ...]"""
        return (
            x.reshape(kv_heads, tile, groups, -1).swapaxes(0, 1).reshape(tile, heads, *x.shape[3:])
        )

    def attend_tile(t: jax.Array, done: _Tiles) -> _Tiles:
        row = jnp.searchsorted(tile_ends, t, side="right")
        nth = t - (tile_ends[row] - (sizes[row] + tile - 1) // tile)
        first = starts[row] + nth * tile
        position = ragged.lengths[row] - sizes[row] + nth * tile + jnp.arange(tile)
        queries = lax.dynamic_slice_in_dim(padded, first, tile).reshape(tile, kv_heads, groups, dim)
        queries = queries.swapaxes(0, 1).reshape(1, kv_heads, tile * groups, dim)
        mine = position < ragged.lengths[row]
        # The tile's other queries must see nothing: what they see counts as live, and there NaN may
        # lie.
        seen = jnp.repeat(jnp.where(mine, position, -1), groups)
        found = _flash(queries, seen[None], pages, ragged.tables[row][None], options, tiled_sinks)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            """Over this row's tokens; the ones behind them belong to the next row."""
            keep = mine.reshape(-1, *[1] * (old.ndim - 1))
            kept = lax.dynamic_slice_in_dim(old, first, tile)
            return lax.dynamic_update_slice_in_dim(old, jnp.where(keep, new, kept), first, 0)

        return _Tiles(*(put(old, ungrouped(new)) for old, new in zip(done, found, strict=True)))

    nothing = _Tiles(
        jnp.zeros((len(padded), heads, options.layout.out_dim)),
        jnp.full((len(padded), heads), -jnp.inf, jnp.float32),
    )
    done = lax.fori_loop(0, tile_ends[-1], attend_tile, nothing)
    return done.out[:num_tokens], done.lse[:num_tokens]


class _Running(NamedTuple):
    """The softmax so far: its peak, its denominator over exp(peak), and the sum of values
    likewise."""

    peak: Float[Array, "B K M"]
    total: Float[Array, "B K M"]
    acc: Float[Array, "B K M V"]


def _flash(
    q: Float[Array, "B K M H"],
    positions: Int[Array, "B M"],
    pages: Pages,
    tables: Int[Array, "B W"],
    options: Options,
    sinks: Float[Array, "K M"],
) -> tuple[Float[Array, "B K M V"], Float[Array, "B K M"]]:
    """Causal attention of M queries per row at `positions` of it, and its log-sum-exp; at -1 a
    query sees nothing.

    The walk begins with the block in which the first window begins and ends with the block of the
    last query.
    """
    batch, kv_heads, queries, _ = q.shape
    page_size = pages.k.shape[2]
    per_block = min(max(1, BLOCK_TOKENS // page_size), tables.shape[1])
    block = per_block * page_size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % per_block)))

    def gather(pool: jax.Array, ids: jax.Array) -> jax.Array:
        """[B, K, S, ...] of a pool [P, K, Z, ...]"""
        return pool[ids].swapaxes(1, 2).reshape(batch, kv_heads, block, *pool.shape[3:])

    def attend_block(i: jax.Array, so_far: _Running) -> _Running:
        ids = lax.dynamic_slice_in_dim(tables, i * per_block, per_block, axis=1)
        live = _seen(
            positions[:, None, :, None],
            i * block + jnp.arange(block)[None, None, None],
            options.window,
        )
        anyone = live.any(2)  # [B, 1, S]
        keys = gather(pages.k, ids)
        products = _product("BKMH,BKSH->BKMS", q, keys.astype(q.dtype))
        if pages.k_scale is not None:
            products = products * gather(pages.k_scale, ids)[:, :, None]
        scores = jnp.where(live, _score(products, options), MASKED)
        peak = jnp.maximum(so_far.peak, scores.max(-1))
        weights = jnp.where(live, jnp.exp(scores - peak[..., None]), 0.0)
        decay = jnp.exp(so_far.peak - peak)
        total = so_far.total * decay + weights.sum(-1)
        values = keys[..., : options.layout.out_dim] if pages.v is None else gather(pages.v, ids)
        value_scale = pages.k_scale if pages.v is None else pages.v_scale
        # A page's dead tail may hold NaN of a failed request, and 0 x NaN is NaN: clear it.
        values = jnp.where(anyone[..., None], values, 0).astype(q.dtype)
        if value_scale is not None:
            weights = weights * jnp.where(anyone, gather(value_scale, ids), 0)[:, :, None]
        update = _product("BKMS,BKSV->BKMV", weights.astype(q.dtype), values)
        return _Running(peak, total, so_far.acc * decay[..., None] + update)

    # A sink is a score that comes before all others and has no value.
    peak = jnp.broadcast_to(sinks[None], (batch, kv_heads, queries))
    start = _Running(
        peak,
        jnp.where(peak > MASKED, 1.0, 0.0),
        jnp.zeros((batch, kv_heads, queries, options.layout.out_dim)),
    )
    blocks = (jnp.max(positions) + block) // block
    end = lax.fori_loop(
        _first_seen(positions, options.window) // block, blocks, attend_block, start
    )
    total = jnp.where(end.total == 0, 1, end.total)  # NaN stays: somebody has to notice
    return end.acc / total[..., None], jnp.where(
        positions[:, None] < 0, -jnp.inf, end.peak + jnp.log(total)
    )


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 from operands of one dtype; without asking, GPUs and TPUs round float32 operands."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=exact, preferred_element_type=jnp.float32)


def _score(products: jax.Array, options: Options) -> jax.Array:
    scaled = products * options.scale
    return (
        scaled if options.softcap is None else options.softcap * jnp.tanh(scaled / options.softcap)
    )


def _seen(query: jax.Array, key: jax.Array, window: int | None) -> jax.Array:
    """Whether queries at these positions see keys at those."""
    past = key <= query
    return past if window is None else past & (key > query - window)


def _first_seen(queries: jax.Array, window: int | None) -> jax.Array:
    """The first position that any of the queries sees; those at -1 see none."""
    if window is None:
        return jnp.int32(0)
    first = jnp.min(jnp.where(queries < 0, jnp.iinfo(jnp.int32).max, queries))
    return jnp.maximum(first - window + 1, 0)
