"""Units of work of a walk on a GPU, and the merging of split rows' results.

A unit is a tile of queries and a part of the positions that they see. Where a row is split depends
on its own length alone, so its result does not depend, bit for bit, on its neighbours.
"""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.paged_attention.gpu_plan import Plan
from jaxserve.pallas_kernels.paged_attention.tiles import Tiles


class Units(NamedTuple):
    """Units of n tiles, each split into at most S parts; live units come first."""

    row: Int[Array, "n*S"]
    first: Int[Array, "n*S"]  # position of the tile's first query
    count: Int[Array, "n*S"]  # number of the tile's queries
    # Positions begin to end - 1 are the unit's; both are multiples of a piece's tokens.
    begin: Int[Array, "n*S"]
    end: Int[Array, "n*S"]
    place: Int[Array, "n*S"]  # where the result is written: tile * S + part
    live: Int[Array, "1"]  # number of live units


def units_of(tiles: Tiles, plan: Plan) -> tuple[Units, Int[Array, "n"]]:
    """Return the units, and the number of parts of every tile."""
    size = plan.piece_tokens
    window = plan.options.window
    begin = (
        jnp.zeros_like(tiles.first)
        if window is None
        else jnp.maximum(tiles.first - window + 1, 0) // size * size
    )
    end = jnp.where(tiles.count > 0, _multiple(tiles.first + tiles.count, size), begin)
    seen = end - begin
    each = _multiple(
        jnp.maximum((seen + plan.splits - 1) // plan.splits, plan.split_tokens), plan.block_tokens
    )
    if plan.splits == 1:
        each = jnp.maximum(seen, size)
    parts = (seen + each - 1) // each
    ends = jnp.cumsum(parts)
    unit = jnp.arange(len(tiles.row) * plan.splits)
    tile = jnp.minimum(
        jnp.searchsorted(ends, unit, side="right", method="compare_all"), len(tiles.row) - 1
    )
    part = unit - (ends - parts)[tile]
    start = begin[tile] + part * each[tile]
    found = Units(
        tiles.row[tile],
        tiles.first[tile],
        tiles.count[tile],
        start,
        jnp.minimum(start + each[tile], end[tile]),
        tile * plan.splits + part,
        ends[-1:],
    )
    return jax.tree.map(lambda x: x.astype(jnp.int32), found), parts


def _multiple(x: jax.Array, of: int) -> jax.Array:
    """Return x rounded up to a multiple."""
    return (x + of - 1) // of * of


def merged(
    out: Float[Array, "n*S K M V"],
    lse: Float[Array, "n*S K M"],
    parts: Int[Array, "n"],
    sinks: Float[Array, "K M"] | None,
) -> tuple[Float[Array, "n K M V"], Float[Array, "n K M"]]:
    """Return every tile's result, merged from its parts, each of which is a softmax of its own.

    A sink takes its share once all parts are together. The sums are written out part by part: XLA
    makes one kernel of elementwise arithmetic, and three of reductions.
    """
    n = len(parts)
    out, lse = (x.reshape(n, -1, *x.shape[1:]) for x in (out, lse))
    splits = out.shape[1]
    if splits == 1 and sinks is None:
        return out[:, 0], lse[:, 0]
    # Places that no unit has written may hold anything, NaN included.
    live = [(parts > part)[:, None, None] for part in range(splits)]
    terms = [jnp.where(live[part], lse[:, part], -jnp.inf) for part in range(splits)]
    each = terms if sinks is None else [*terms, jnp.broadcast_to(sinks[None], terms[0].shape)]
    peak = reduce(jnp.maximum, each)
    total = peak + jnp.log(reduce(jnp.add, [jnp.exp(term - peak) for term in each]))
    shares = [jnp.exp(term - total)[..., None] for term in terms]
    values = [
        jnp.where(live[part][..., None], out[:, part].astype(jnp.float32), 0)
        for part in range(splits)
    ]
    return reduce(
        jnp.add, [share * value for share, value in zip(shares, values, strict=True)]
    ), total
