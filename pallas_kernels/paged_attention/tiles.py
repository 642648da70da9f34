"""Tiles of a step's query tokens.

Each tile belongs to one row, and all have room for the same number of tokens.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.paged_attention.api import Ragged


class Tiles(NamedTuple):
    """Tiles of query tokens; live ones come first, the others have no queries."""

    row: Int[Array, "n"]
    first: Int[Array, "n"]  # position, within the row, of the first query
    count: Int[Array, "n"]  # number of queries, at most `tokens`
    token: Int[Array, "n"]  # number of the first query among the step's tokens
    live: Int[Array, "1"]  # number of tiles with queries
    # Place of each token of the step: tile * tokens + its number in the tile; -1 without a tile.
    place: Int[Array, "T"]
    tokens: int  # room of a tile

    def padded_to(self, multiple: int) -> "Tiles":
        """Return these tiles and as many dead ones as make their number a multiple."""
        more = -len(self.row) % multiple
        return self._replace(
            **{name: jnp.pad(getattr(self, name), (0, more)) for name in self._fields[:4]}
        )


def decode_tiles(ragged: Ragged) -> Tiles:
    """Return one tile per row of a decode step, in which token r is row r's only query.

    Rows without a token are dead tiles; they come last.
    """
    live = ragged.lengths > 0
    rows = jnp.arange(len(live))
    place = jnp.where(live, rows, -1)
    return Tiles(
        rows, ragged.lengths - 1, live.astype(jnp.int32), rows, live.sum(keepdims=True), place, 1
    )


def single_tiles(ragged: Ragged, num_tokens: int) -> Tiles:
    """Return tiles of one token for the rows that have one, in a step with other rows too."""
    single = ragged.split[0]
    tiles = decode_tiles(
        ragged._replace(
            lengths=jnp.where(jnp.arange(len(ragged.lengths)) < single, ragged.lengths, 0)
        )
    )
    token = jnp.arange(num_tokens)
    return tiles._replace(place=jnp.where(token < single, token, -1))


def ragged_tiles(ragged: Ragged, num_tokens: int, tokens: int, least: int = 1) -> Tiles:
    """Return tiles of up to `tokens` tokens of one row each.

    Every tile of a row is full but the last. Rows with fewer than `least` tokens get no tiles.
    """
    sizes = ragged.starts[1:] - ragged.starts[:-1]
    sizes = jnp.where(sizes < least, 0, sizes)
    per_row = (sizes + tokens - 1) // tokens
    ends = jnp.cumsum(per_row)
    # The number of tiles is static: all full ones, and one that is nearly empty for every row.
    tile = jnp.arange(num_tokens // tokens + min(len(sizes), num_tokens))
    is_live = tile < ends[-1]
    row = jnp.where(is_live, jnp.searchsorted(ends, tile, side="right", method="compare_all"), 0)
    behind = (tile - (ends - per_row)[row]) * tokens  # tokens of the row before this tile
    count = jnp.where(is_live, jnp.minimum(sizes[row] - behind, tokens), 0)
    first = ragged.lengths[row] - sizes[row] + behind
    token = jnp.arange(num_tokens)
    owner = jnp.minimum(
        jnp.searchsorted(ragged.starts, token, side="right", method="compare_all") - 1,
        len(sizes) - 1,
    )
    tiled = (token < ragged.starts[-1]) & (sizes[owner] > 0)
    place = jnp.where(tiled, (ends - per_row)[owner] * tokens + token - ragged.starts[owner], -1)
    return Tiles(row, first, count, ragged.starts[row] + behind, ends[-1:], place, tokens)


def gathered(q: Float[Array, "T N H"], tiles: Tiles, kv_heads: int) -> Float[Array, "n K M H"]:
    """Return the queries by tile and kv head.

    Row t * G + g of M is the tile's token t with the g-th query head of the kv head. Rows beyond a
    tile's count hold other tokens' queries.
    """
    heads, dim = q.shape[1:]
    token = tiles.token[:, None] + jnp.arange(tiles.tokens)[None]
    found = q[jnp.minimum(token, len(q) - 1)].reshape(
        *token.shape, kv_heads, heads // kv_heads, dim
    )
    return found.swapaxes(1, 2).reshape(len(token), kv_heads, -1, dim)


def by_token(x: Float[Array, "n K M V"], tiles: Tiles, empty: float) -> Float[Array, "T N V"]:
    """Return a tile's rows by token, and `empty` for other tokens: the inverse of `gathered`."""
    n, kv_heads, _, dim = x.shape
    found = (
        x.reshape(n, kv_heads, tiles.tokens, -1, dim)
        .swapaxes(1, 2)
        .reshape(n * tiles.tokens, -1, dim)
    )
    return jnp.where(tiles.place[:, None, None] < 0, empty, found[tiles.place])
