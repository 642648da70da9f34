"""Paged attention in plain XLA: the reference for every kernel, and the implementation on CPUs.

Pages lie in the canonical order of `Pages`.

Attention walks over blocks of a row's pages with a running softmax (Milakov and Gimelshein 2018;
the forward pass of FlashAttention-2), as far as the longest row of the batch reaches: unused width
of a page table costs nothing. A block beyond a row's length leaves its accumulators bit for bit
unchanged (it multiplies by 1 and adds 0), so a row's result does not depend on the lengths of its
neighbours.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.paged_attention.api import (
    LARGEST,
    Attended,
    Demand,
    KernelError,
    Layout,
    Options,
    Pages,
    Ragged,
    quantize,
)

# Score of a masked position. It is finite, since in a block that is masked throughout the peak is
# this score too, and -inf - -inf would be NaN.
MASKED = -1e30
BLOCK_TOKENS = 64  # kv positions of an iteration of the walk
TILE_TOKENS = 32  # query tokens of one row that are handled together in a ragged step


def check(options: Options, demand: Demand) -> None:
    """Accept any size in which query heads share kv heads evenly; raise KernelError otherwise."""
    kv_heads = options.layout.kv_heads
    if demand.heads % kv_heads:
        raise KernelError(f"{demand.heads} query heads do not divide by {kv_heads} kv heads")


def axes(layout: Layout) -> Pages:
    """Return the axis letters of the pages' arrays, K being the dimension split over shards."""
    scale = "PKZ" if layout.scaled else None
    if layout.value_dim is None:
        return Pages("PKZH", "PKZH", scale, scale)
    return Pages("P_ZH", None, scale and "P_Z", None)  # one head, for every shard


@jax.enable_x64(False)
def allocate(num_pages: int, layout: Layout) -> Pages:
    """Return zeroed pages.

    Unwritten memory may hold NaN, which a debugger of NaNs would report.
    """

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
    """Store each token's k and v at (page, offset), in place when the pages are donated.

    Page P drops the token.
    """
    return put(pages, stored(k, v, pages.k.dtype), page, offset)


def put(pages: Pages, new: Pages, page: Int[Array, "T"], offset: Int[Array, "T"]) -> Pages:
    """Store tokens that are as pages hold them; see `write`."""
    num_pages, kv_heads, page_size, _ = pages.k.shape
    # XLA turns a scatter of a single row into a select, for which it copies the pages. A second
    # row, which is dropped, avoids that.
    is_single = kv_heads == len(page) == 1
    if is_single:
        page = jnp.append(page, num_pages)
        offset = jnp.append(offset, 0)
    # Rows of H numbers are addressed by one index where possible: for a scatter with three indices
    # XLA:TPU changes the layout of the whole pool, and then back. With one kv head three indices
    # are used: XLA:CPU cannot reshape away a dimension of one without a copy, and no compiler
    # changes the layout there.
    rows = (page[:, None] * kv_heads + jnp.arange(kv_heads)[None]) * page_size + offset[:, None]
    if kv_heads == 1:
        view = (num_pages, 1, page_size)
        where = (page, 0, offset)
    else:
        view = (-1,)
        where = (rows.reshape(-1),)

    def put_into(pool: jax.Array, new: jax.Array) -> jax.Array:
        values = new.reshape(-1, *new.shape[2:])
        values = jnp.concatenate([values, values]) if is_single else values
        return (
            pool.reshape(*view, *pool.shape[3:])
            .at[where]
            .set(values, mode="drop")
            .reshape(pool.shape)
        )

    return jax.tree.map(put_into, pages, new)


def stored(k: Float[Array, "T K H"], v: Float[Array, "T K H"] | None, dtype: jnp.dtype) -> Pages:
    """Return tokens as pages of this dtype hold them: k and v [T, K, H], scales [T, K]."""
    if dtype not in LARGEST:
        return Pages(k.astype(dtype), None if v is None else v.astype(dtype))
    k, k_scale = quantize(k, dtype)
    v, v_scale = (None, None) if v is None else quantize(v, dtype)
    return Pages(k, v, k_scale, v_scale)


def read(pages: Pages, ids: Int[Array, "n"], layout: Layout) -> Pages:
    """Return copies of the pages `ids` in canonical order."""
    return jax.tree.map(lambda pool: pool[ids].swapaxes(1, 2), pages)


def write_back(pages: Pages, ids: Int[Array, "n"], canonical: Pages, layout: Layout) -> Pages:
    """Store pages in canonical order; id P, which is out of range, drops its page."""
    return jax.tree.map(
        lambda pool, x: pool.at[ids].set(x.swapaxes(1, 2), mode="drop"), pages, canonical
    )


@jax.enable_x64(False)
def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pages: Pages,
    ragged: Ragged,
    options: Options,
    sinks: Float[Array, "N"] | None = None,
) -> Attended:
    """Write the new tokens, then attend; see `api.PagedAttention.attend`."""
    pages = write(pages, k, v, ragged.page, ragged.offset)
    heads = q.shape[1]
    no_sink = jnp.full(heads, MASKED) if sinks is None else sinks.astype(jnp.float32)
    attention = _decode if options.max_row_tokens == 1 else _ragged
    out, lse = attention(q, pages, ragged, options, no_sink)
    return Attended(out.astype(q.dtype), pages, lse if options.lse else None)


def _decode(
    q: jax.Array, pages: Pages, ragged: Ragged, options: Options, sinks: jax.Array
) -> tuple[Float[Array, "R N V"], Float[Array, "R N"]]:
    """Attend from one query per row, which is at position lengths - 1."""
    rows, heads, dim = q.shape
    kv_heads = options.layout.kv_heads
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    positions = jnp.broadcast_to((ragged.lengths - 1)[:, None], (rows, heads // kv_heads))
    out, lse = _flash(
        grouped, positions, pages, ragged.tables, options, sinks.reshape(kv_heads, -1)
    )
    return out.reshape(rows, heads, -1), lse.reshape(rows, heads)


class _Tiles(NamedTuple):
    """Results of the tiles of a ragged step that are done so far."""

    out: Float[Array, "T N V"]
    lse: Float[Array, "T N"]


def _ragged(
    q: jax.Array, pages: Pages, ragged: Ragged, options: Options, sinks: jax.Array
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """Attend tile by tile, each of up to TILE_TOKENS query tokens of one row.

    Tiles begin at a row's first token, so that a row's result does not depend on where the row lies
    among the packed tokens.
    """
    num_tokens, heads, dim = q.shape
    kv_heads = options.layout.kv_heads
    starts = ragged.starts
    groups = heads // kv_heads
    tile = min(TILE_TOKENS, num_tokens)
    sizes = starts[1:] - starts[:-1]
    tile_ends = jnp.cumsum((sizes + tile - 1) // tile)
    # The last tile may reach past T, and a dynamic slice would be moved back to fit.
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    tiled_sinks = jnp.tile(sinks.reshape(kv_heads, groups), tile)

    def ungrouped(x: jax.Array) -> jax.Array:
        """Return [1, K, tile * G, ...] as [tile, N, ...]."""
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
        # The tile's other queries must see nothing: positions that they see would count as live,
        # and may hold NaN.
        seen = jnp.repeat(jnp.where(mine, position, -1), groups)
        found = _flash(queries, seen[None], pages, ragged.tables[row][None], options, tiled_sinks)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            """Store the results of this row's tokens; keep those that follow, which are the next
            row's.
            """
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
    """Running softmax over the blocks seen so far."""

    peak: Float[Array, "B K M"]  # largest score
    total: Float[Array, "B K M"]  # denominator divided by exp(peak)
    acc: Float[Array, "B K M V"]  # weighted sum of values divided by exp(peak)


def _flash(
    q: Float[Array, "B K M H"],
    positions: Int[Array, "B M"],
    pages: Pages,
    tables: Int[Array, "B W"],
    options: Options,
    sinks: Float[Array, "K M"],
) -> tuple[Float[Array, "B K M V"], Float[Array, "B K M"]]:
    """Return the causal attention of M queries per row, and its log-sum-exp.

    The walk begins with the block that holds the first position of any window and ends with the
    block of the last query.

    Args:
        positions: Positions of the queries within their rows; a query at -1 sees nothing.
    """
    batch, kv_heads = q.shape[:2]
    page_size = pages.k.shape[2]
    per_block = min(max(1, BLOCK_TOKENS // page_size), tables.shape[1])
    block = per_block * page_size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % per_block)))

    def gather(pool: jax.Array, ids: jax.Array) -> jax.Array:
        """Return pages `ids` [B, n] of a pool [P, K, Z, ...] as [B, K, S, ...]."""
        return pool[ids].swapaxes(1, 2).reshape(batch, kv_heads, block, *pool.shape[3:])

    def attend_block(i: jax.Array, so_far: _Running) -> _Running:
        ids = lax.dynamic_slice_in_dim(tables, i * per_block, per_block, axis=1)
        live = _seen(
            positions[:, None, :, None],
            i * block + jnp.arange(block)[None, None, None],
            options.window,
        )
        anyone = live.any(2)  # [B, 1, S]: positions that at least one query sees
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
        # Positions that no query sees may hold NaN of a failed request; their weight is 0, but
        # 0 x NaN is NaN.
        values = jnp.where(anyone[..., None], values, 0).astype(q.dtype)
        if value_scale is not None:
            weights = weights * jnp.where(anyone, gather(value_scale, ids), 0)[:, :, None]
        update = _product("BKMS,BKSV->BKMV", weights.astype(q.dtype), values)
        return _Running(peak, total, so_far.acc * decay[..., None] + update)

    start = _start(sinks, batch, options)
    blocks = (jnp.max(positions) + block) // block
    end = lax.fori_loop(
        _first_seen(positions, options.window) // block, blocks, attend_block, start
    )
    return _normalized(end, positions)


def _start(sinks: Float[Array, "K M"], batch: int, options: Options) -> _Running:
    """Return the running softmax before the first block.

    A sink is a score that precedes all others and has no value: the walk starts with its score as
    the peak and exp(0) = 1 as the denominator.
    """
    peak = jnp.broadcast_to(sinks[None], (batch, *sinks.shape))
    return _Running(
        peak, jnp.where(peak > MASKED, 1.0, 0.0), jnp.zeros((*peak.shape, options.layout.out_dim))
    )


def _normalized(
    end: _Running, positions: Int[Array, "B M"]
) -> tuple[Float[Array, "B K M V"], Float[Array, "B K M"]]:
    """Return attention and log-sum-exp after the last block; -inf for a query at -1."""
    total = jnp.where(end.total == 0, 1, end.total)  # NaN stays, so that it is noticed
    return end.acc / total[..., None], jnp.where(
        positions[:, None] < 0, -jnp.inf, end.peak + jnp.log(total)
    )


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return an einsum in float32; float32 operands are multiplied at full precision."""
    # At the default precision GPUs and TPUs round float32 operands.
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=exact, preferred_element_type=jnp.float32)


def _score(products: jax.Array, options: Options) -> jax.Array:
    """Return scores from products of queries and keys: scaled, and soft-capped if asked."""
    scaled = products * options.scale
    return (
        scaled if options.softcap is None else options.softcap * jnp.tanh(scaled / options.softcap)
    )


def _seen(query: jax.Array, key: jax.Array, window: int | None) -> jax.Array:
    """Return whether queries at these positions see keys at those."""
    past = key <= query
    return past if window is None else past & (key > query - window)


def _first_seen(queries: jax.Array, window: int | None) -> jax.Array:
    """Return the first position that any query sees; queries at -1 see none."""
    if window is None:
        return jnp.int32(0)
    first = jnp.min(jnp.where(queries < 0, jnp.iinfo(jnp.int32).max, queries))
    return jnp.maximum(first - window + 1, 0)
