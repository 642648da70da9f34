"""Writes of chunks of new tokens into pages on a TPU, a page at a time.

A page that gets new tokens is read, merged with them, and written back whole.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from jaxserve.pallas_kernels.paged_attention.api import Layout, Pages, Ragged, quantize
from jaxserve.pallas_kernels.paged_attention.lanes import pack


def stored(k: Float[Array, "T K H"], v: Float[Array, "T K H"] | None, layout: Layout) -> Pages:
    """Return tokens as pages hold them: k [T, K, C] in the pages' dtype, scales [T, K] float32."""
    if not layout.scaled:
        return Pages(pack(k, v, layout).astype(layout.dtype))
    k, k_scale = quantize(k, layout.dtype)
    v, v_scale = (None, None) if v is None else quantize(v, layout.dtype)
    return Pages(pack(k, v, layout), None, k_scale, v_scale)


class Visits(NamedTuple):
    """Pages that get new tokens, live ones first; the others repeat the last and change nothing."""

    page: Int[Array, "n"]
    begin: Int[Array, "n"]  # places begin to end - 1 of the page are written; none if equal
    end: Int[Array, "n"]
    # The number, in the step, of the token at the page's place 0 if the row began there; it may be
    # another row's, or negative.
    token: Int[Array, "n"]
    live: Int[Array, "1"]  # number of live visits


def visits_of(ragged: Ragged, num_tokens: int, page_size: int) -> Visits:
    """Return the pages that rows with more than one token write in this step."""
    sizes = ragged.starts[1:] - ragged.starts[:-1]
    first = ragged.lengths - sizes
    first_page = first // page_size
    per_row = jnp.where(sizes > 1, (ragged.lengths + page_size - 1) // page_size - first_page, 0)
    ends = jnp.cumsum(per_row)
    # The number of visits is static: full pages, and two more for each row with several tokens,
    # which may begin and end within a page.
    visit = jnp.arange(num_tokens // page_size + 2 * max(1, min(len(sizes), num_tokens // 2)))
    is_live = visit < ends[-1]
    visit = jnp.clip(visit, 0, jnp.maximum(ends[-1] - 1, 0))
    row = jnp.minimum(jnp.searchsorted(ends, visit, side="right"), len(sizes) - 1)
    nth = first_page[row] + visit - (ends - per_row)[row]
    base = nth * page_size
    begin = jnp.maximum(first[row] - base, 0)
    end = jnp.minimum(ragged.lengths[row] - base, page_size)
    token = ragged.starts[row] + base - first[row]
    # Tokens of a row that had ended before this step must not be written.
    kept = is_live & (
        ragged.page[jnp.clip(token + begin, 0, num_tokens - 1)] == ragged.tables[row, nth]
    )
    return Visits(
        ragged.tables[row, nth],
        jnp.where(kept, begin, 0),
        jnp.where(kept, end, 0),
        token,
        ends[-1:],
    )


def put_pages(
    pool: Shaped[Array, "P *page"], ids: Int[Array, "n"], new: Shaped[Array, "n *page"]
) -> jax.Array:
    """Store whole pages; id P drops its page.

    The pages are stored one by one: for a scatter, XLA changes the layout of pools of scales, and
    then back.
    """
    last = len(pool) - 1

    def put(pool: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        id, page = given
        at = jnp.minimum(id, last)
        return lax.dynamic_update_index_in_dim(
            pool, jnp.where(id <= last, page, pool[at]), at, 0
        ), None

    return lax.scan(put, pool, (ids, new))[0]


def write_chunks(pages: Pages, new: Pages, ragged: Ragged, layout: Layout) -> Pages:
    """Write the tokens of rows with more than one into their pages, in place if donated.

    Args:
        new: The step's tokens from `stored`.
    """
    visits = visits_of(ragged, len(new.k), layout.page_size)
    token = jnp.clip(visits.token[:, None] + jnp.arange(layout.page_size)[None], 0, len(new.k) - 1)
    aligned = jax.tree.map(lambda x: x[token].swapaxes(1, 2), new)  # [n, K, Z, ...]
    k = _write(pages.k, aligned.k, visits, places=2)
    scales = [
        None if pool is None else _write(pool, x[:, :, None], visits, places=3)
        for pool, x in ((pages.k_scale, aligned.k_scale), (pages.v_scale, aligned.v_scale))
    ]
    return Pages(k, None, *scales)


def _write(
    pool: Float[Array, "P K ..."], new: Float[Array, "n K ..."], visits: Visits, places: int
) -> Float[Array, "P K ..."]:
    """Write tokens, aligned to pages as [n, K, Z, ...], into a pool.

    The dimension `places` of a page counts its Z tokens.
    """

    def kernel(
        page: Any, begin: Any, end: Any, live: Any, new_ref: Any, old_ref: Any, out_ref: Any
    ) -> None:
        visit = pl.program_id(0)

        # Dead visits repeat the last live one's page. Consecutive steps with the same page share
        # its buffer, so a dead visit that wrote the old page would undo the live one. Visit 0
        # always writes: its buffer goes back to the page, and without it would hold garbage.
        @pl.when((visit < live[0]) | (visit == 0))
        def _() -> None:
            place = lax.broadcasted_iota(jnp.int32, out_ref.shape, places)
            fresh = (place >= begin[visit]) & (place < end[visit])
            merged = jnp.where(
                fresh, new_ref[...].astype(jnp.float32), old_ref[...].astype(jnp.float32)
            )
            out_ref[...] = merged.astype(out_ref.dtype)

    block = (1, *pool.shape[1:])
    zeros = (0,) * (pool.ndim - 1)
    in_page = pl.BlockSpec(block, lambda visit, page, *_: (page[visit], *zeros))
    return pl.pallas_call(
        kernel,
        out_shape=pltpu.HBM(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(len(visits.page),),
            in_specs=[pl.BlockSpec(block, lambda visit, *_: (visit, *zeros)), in_page],
            out_specs=in_page,
        ),
        input_output_aliases={5: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="page_write",
    )(visits.page, visits.begin, visits.end, visits.live, new, pool)
