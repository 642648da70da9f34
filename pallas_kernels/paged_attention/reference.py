"""Paged attention in plain XLA: the reference of every kernel, and what runs on a CPU.

Pages of one lane and one layer are a pair of arrays [P, K, Z, H]. The attention walks over blocks of a row's pages with
a running softmax (Milakov and Gimelshein 2018; FlashAttention-2's forward pass), and walks only as far as the
longest row of the batch reaches: a page table costs nothing for the width that nobody uses. A block beyond a row's
length changes none of its bits (it multiplies by 1 and adds 0), so a row does not feel how long its neighbours are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

MASKED = -1e30  # not -inf: a fully masked block must give exp(0), not exp(nan)
BLOCK_TOKENS = 64  # kv positions per iteration
TILE_TOKENS = 32  # query tokens of one row handled together in a ragged step


class Pages(NamedTuple):
    """K and V of one layer of one lane, [P, K, Z, H] each."""

    k: jax.Array
    v: jax.Array


class Scores(NamedTuple):
    """What becomes of a query's products with the keys, and which keys it sees."""

    scale: float
    window: int | None
    softcap: float | None

    def __call__(self, products: jax.Array) -> jax.Array:
        scaled = products * self.scale
        return scaled if self.softcap is None else self.softcap * jnp.tanh(scaled / self.softcap)

    def seen(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Whether queries at these positions see keys at those."""
        past = key <= query
        return past if self.window is None else past & (key > query - self.window)

    def first_seen(self, queries: jax.Array) -> jax.Array:
        """The first position that any of the queries sees; those at -1 see none."""
        if self.window is None:
            return jnp.int32(0)
        first = jnp.min(jnp.where(queries < 0, jnp.iinfo(jnp.int32).max, queries))
        return jnp.maximum(first - self.window + 1, 0)


def allocate(num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: jnp.dtype) -> Pages:
    """Zeroed pages. Zeroed arrays: unwritten memory may hold NaN, which a debugger would report."""
    shape = (num_pages, kv_heads, page_size, head_dim)
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(
    pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> Pages:
    """Store each token's k and v at (page, offset), in place when the pages are donated; page id P drops the token."""
    if len(page) == 1:  # XLA makes a select of a scatter of one token, and copies the pages for it: add one to drop
        page, offset = jnp.append(page, len(pages.k)), jnp.append(offset, 0)
        k, v = (jnp.concatenate([x, x]) for x in (k, v))
    return Pages(
        pages.k.at[page, :, offset].set(k.astype(pages.k.dtype), mode="drop"),
        pages.v.at[page, :, offset].set(v.astype(pages.v.dtype), mode="drop"),
    )


def read(pages: Pages, ids: Int[Array, "n"]) -> tuple[Float[Array, "n Z K H"], Float[Array, "n Z K H"]]:
    """Pages in canonical order, whatever the layout."""
    return pages.k[ids].swapaxes(1, 2), pages.v[ids].swapaxes(1, 2)


def write_back(pages: Pages, ids: Int[Array, "n"], k: Float[Array, "n Z K H"], v: Float[Array, "n Z K H"]) -> Pages:
    """The inverse of `read`."""
    return Pages(
        pages.k.at[ids].set(k.swapaxes(1, 2).astype(pages.k.dtype)),
        pages.v.at[ids].set(v.swapaxes(1, 2).astype(pages.v.dtype)),
    )


def decode(
    q: Float[Array, "R N H"],
    pages: Pages,
    tables: Int[Array, "R W"],
    lengths: Int[Array, "R"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "R N H"]:
    """One query token per row, at position lengths - 1; rows of length 0 give zeros.

    window: a query sees that many positions, its own the last; None: all. softcap: scores s become cap * tanh(s / cap).
    """
    rows, heads, dim = q.shape
    kv_heads = pages.k.shape[1]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim)
    positions = jnp.broadcast_to((lengths - 1)[:, None], (rows, heads // kv_heads))
    out = _flash(grouped, positions, pages, tables, Scores(scale, window, softcap))
    return out.reshape(rows, heads, dim)


def prefill(
    q: Float[Array, "T N H"],
    pages: Pages,
    tables: Int[Array, "R W"],
    lengths: Int[Array, "R"],
    starts: Int[Array, "R+1"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "T N H"]:
    """Ragged chunks packed into T tokens; row r owns tokens starts[r]:starts[r+1], the last at position lengths[r] - 1.

    Works through tiles of TILE_TOKENS query tokens of one row, so a row's result does not depend on where in the
    packing it lies. Tokens that belong to no row give zeros.
    """
    num_tokens, heads, dim = q.shape
    kv_heads = pages.k.shape[1]
    groups = heads // kv_heads
    tile = min(TILE_TOKENS, num_tokens)
    scores = Scores(scale, window, softcap)
    sizes = starts[1:] - starts[:-1]
    tile_ends = jnp.cumsum((sizes + tile - 1) // tile)
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))  # the last tile may reach past T

    def attend_tile(t: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(tile_ends, t, side="right")
        nth = t - (tile_ends[row] - (sizes[row] + tile - 1) // tile)
        first = starts[row] + nth * tile
        position = lengths[row] - sizes[row] + nth * tile + jnp.arange(tile)
        queries = lax.dynamic_slice_in_dim(padded, first, tile).reshape(tile, kv_heads, groups, dim)
        queries = queries.transpose(1, 0, 2, 3).reshape(1, kv_heads, tile * groups, dim)
        mine = position < lengths[row]
        # The tile's other queries must see nothing: what they see counts as live, and there NaN may lie.
        seen = jnp.repeat(jnp.where(mine, position, -1), groups)
        result = _flash(queries, seen[None], pages, tables[row][None], scores)
        result = result.reshape(kv_heads, tile, groups, dim).transpose(1, 0, 2, 3).reshape(tile, heads, dim)
        kept = lax.dynamic_slice_in_dim(out, first, tile)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mine[:, None, None], result, kept), first, 0)

    return lax.fori_loop(0, tile_ends[-1], attend_tile, jnp.zeros(padded.shape, jnp.float32))[:num_tokens]


def _flash(
    q: Float[Array, "B K M H"],
    positions: Int[Array, "B M"],
    pages: Pages,
    tables: Int[Array, "B W"],
    score: Scores,
) -> Float[Array, "B K M H"]:
    """Causal attention of M queries per row at `positions` of it; a query at -1 sees nothing and gives 0.

    The walk begins with the block in which the first window begins and ends with the block of the last query.
    """
    batch, kv_heads, queries, dim = q.shape
    page_size = pages.k.shape[2]
    per_block = min(max(1, BLOCK_TOKENS // page_size), tables.shape[1])
    block = per_block * page_size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % per_block)))

    def gather(array: jax.Array, ids: jax.Array) -> jax.Array:
        return array[ids].swapaxes(1, 2).reshape(batch, kv_heads, block, dim)

    def attend_block(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        peak, total, acc = carry
        ids = lax.dynamic_slice_in_dim(tables, i * per_block, per_block, axis=1)
        live = score.seen(positions[:, None, :, None], i * block + jnp.arange(block)[None, None, None])  # [B, 1, M, S]
        products = jnp.einsum("BKMH,BKSH->BKMS", q, gather(pages.k, ids), preferred_element_type=jnp.float32)
        scores = jnp.where(live, score(products), MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        weights = jnp.where(live, jnp.exp(scores - new_peak[..., None]), 0.0)
        decay = jnp.exp(peak - new_peak)
        # A page's dead tail may hold NaN of a failed request, and 0 x NaN is NaN: clear it.
        v = jnp.where(live.any(2)[..., None], gather(pages.v, ids), 0)
        update = jnp.einsum("BKMS,BKSH->BKMH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_peak, total * decay + weights.sum(-1), acc * decay[..., None] + update

    start = (
        jnp.full((batch, kv_heads, queries), MASKED),
        jnp.zeros((batch, kv_heads, queries)),
        jnp.zeros((batch, kv_heads, queries, dim)),
    )
    blocks = (jnp.max(positions) + block) // block
    _, total, acc = lax.fori_loop(score.first_seen(positions) // block, blocks, attend_block, start)
    return jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)[..., None].astype(jnp.float32) * acc
