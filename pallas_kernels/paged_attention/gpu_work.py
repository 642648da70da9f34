"""What a walk on a GPU has to do, as a list of units; and results of split rows merged.

A unit is a tile of queries and a part of the positions that they see. Where a row is split depends
on its own length alone, so that its bits do not depend on its neighbours.
"""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.gpu_plan import Plan
from pallas_kernels.paged_attention.tiles import Tiles


class Units(NamedTuple):
    """Of n tiles, each split in at most S parts. Live units come first."""

    row: Int[Array, "n*S"]
    first: Int[Array, "n*S"]  # position of the tile's first query
    count: Int[Array, "n*S"]  # of its queries
    begin: Int[
        Array, "n*S"
    ]  # positions, from begin on and before end; both where a piece of a page begins
    end: Int[Array, "n*S"]
    place: Int[Array, "n*S"]  # of the result: tile * S + part
    live: Int[Array, "1"]


def units_of(tiles: Tiles, plan: Plan) -> tuple[Units, Int[Array, "n"]]:
    """The units, and how many parts every tile has."""
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
    return (x + of - 1) // of * of


def merged(
    out: Float[Array, "n*S K M V"],
    lse: Float[Array, "n*S K M"],
    parts: Int[Array, "n"],
    sinks: Float[Array, "K M"] | None,
) -> tuple[Float[Array, "n K M V"], Float[Array, "n K M"]]:
    """Every tile's result from those of its parts, each a softmax of its own; a sink takes its
    share of all.

    Written out part by part, since XLA makes one kernel of elementwise arithmetic, and three of
    reductions.
    """
    n = len(parts)
    out, lse = (x.reshape(n, -1, *x.shape[1:]) for x in (out, lse))
    splits = out.shape[1]
    if splits == 1 and sinks is None:
        return out[:, 0], lse[:, 0]
    # What no unit has written may be anything.
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
