"""Paged attention on TPUs, in Pallas: one walk over pages for decode steps, prompt chunks and
verified drafts alike.

A page keeps a token's key and value side by side in the lanes, so that one copy brings both, for
all kv heads of the shard (`lanes.py`). Work comes in tiles: a few query tokens of one row (one, in
a decode step). The kernel walks every tile over the blocks of pages that its queries see and
nothing else, with a running softmax (FlashAttention-2), and while it computes one block it fetches
the next: of the same tile, or the first of the next tile, also across the steps of the grid. The
order of the walk is that of the ragged paged attention kernels of vLLM and jax; pages, tiles and
writes are laid out anew.

A decode step walks all kv heads of a page together, in few and large copies. Chunks are walked one
kv head at a time, so that a tile can have the hundreds of queries that make a page worth fetching;
of a tile with one token, in a step that has both, only its few rows are computed.

New tokens: the walk itself puts the token of a row that has one into its last block and writes the
few sublanes around it back, so that no page is read for the sake of writing. Chunks are written
before, page by page (`tpu_write.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import tpu_write
from pallas_kernels.paged_attention.api import (
    Attended,
    Demand,
    KernelError,
    Layout,
    Options,
    Pages,
    Ragged,
)
from pallas_kernels.paged_attention.lanes import TILE_LANES, Lanes, pack, sublanes, unpack, widen
from pallas_kernels.paged_attention.tiles import (
    Tiles,
    by_token,
    decode_tiles,
    gathered,
    ragged_tiles,
)
from pallas_kernels.paged_attention.tpu_body import Body, Scalars
from pallas_kernels.paged_attention.tpu_plan import Plan, plan_of

SCALAR_BYTES = 2**19  # of scalar memory for page tables


def check(options: Options, demand: Demand) -> None:
    layout = options.layout
    kv_heads = layout.kv_heads
    size = layout.page_size
    step = sublanes(layout.dtype)
    if demand.heads % kv_heads:
        raise KernelError(f"{demand.heads} query heads do not divide by {kv_heads} kv heads")
    if layout.scaled:
        step = 128  # scales lie in the lanes
    if size % step:
        raise KernelError(
            f"pages of {size} tokens of {layout.dtype}: on a TPU the size is a multiple of "
            f"{step} (--page-size, or "
            "--attention reference)"
        )
    if (table := 4 * demand.rows * demand.table_width) > SCALAR_BYTES:
        raise KernelError(
            f"page tables of {demand.rows} rows x {demand.table_width} pages take {table} bytes "
            f"of scalar memory; "
            f"there is room for {SCALAR_BYTES} (--max-batch, --max-context, or larger pages: "
            f"--page-size)"
        )


def axes(layout: Layout) -> Pages:
    scale = "PK_Z" if layout.scaled else None
    if layout.value_dim is None:
        return Pages("PKZ_", None, scale, scale)
    return Pages("P_Z_", None, scale and "P__Z", None)  # one head, for every shard


def allocate(num_pages: int, layout: Layout) -> Pages:
    """k [P, K, Z, C]: key and value beside each other in C lanes, of which those that neither has
    stay 0. Scales [P, K, 1, Z]: a copy of some heads begins where it likes only if heads are no
    dimension of tiles.
    """
    k = jnp.zeros(
        (num_pages, layout.kv_heads, layout.page_size, Lanes.of(layout).total), layout.dtype
    )
    if not layout.scaled:
        return Pages(k)

    def scale() -> jax.Array:
        return jnp.zeros((num_pages, layout.kv_heads, 1, layout.page_size), jnp.float32)

    return Pages(k, None, scale(), scale() if layout.value_dim is None else None)


def read(pages: Pages, ids: Int[Array, "n"], layout: Layout) -> Pages:
    """In canonical order."""
    k, v = unpack(pages.k[ids].swapaxes(1, 2), layout)
    scales = [
        None if pool is None else pool[ids][:, :, 0].swapaxes(1, 2)
        for pool in (pages.k_scale, pages.v_scale)
    ]
    return Pages(k, v, *scales)


def write_back(pages: Pages, ids: Int[Array, "n"], canonical: Pages, layout: Layout) -> Pages:
    k = pack(canonical.k, canonical.v, layout).swapaxes(1, 2)
    scales = [
        None if x is None else x.swapaxes(1, 2)[:, :, None]
        for x in (canonical.k_scale, canonical.v_scale)
    ]
    return jax.tree.map(
        lambda pool, x: tpu_write.put_pages(pool, ids, x), pages, Pages(k, None, *scales)
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
    new = tpu_write.stored(k, v, options.layout)
    plan = plan_of(options, q.shape[1], len(ragged.lengths), len(q), ragged.tables.shape[1])
    if options.max_row_tokens != 1:
        pages = tpu_write.write_chunks(pages, new, ragged, options.layout)
    return _walk(q, new, pages, ragged, tiles_of(ragged, plan, len(q)), plan, sinks)


def tiles_of(ragged: Ragged, plan: Plan, num_tokens: int) -> Tiles:
    tiles = (
        decode_tiles(ragged)
        if plan.options.max_row_tokens == 1
        else ragged_tiles(ragged, num_tokens, plan.tokens)
    )
    return tiles.padded_to(plan.per_step)


def _walk(
    q: jax.Array,
    new: Pages,
    pages: Pages,
    ragged: Ragged,
    tiles: Tiles,
    plan: Plan,
    sinks: jax.Array | None,
) -> Attended:
    options = plan.options
    lanes = plan.lanes
    heads = plan.heads
    rows = plan.rows
    layout = options.layout
    n = len(tiles.row)

    def tiled(*shape: int) -> pl.BlockSpec:
        """Of these heads' part of arrays [n, K, ...]."""
        return pl.BlockSpec(
            (plan.per_step, heads, *shape), lambda i, group, *_: (i, group, *(0 for _ in shape))
        )

    inputs = {
        "q": (widen(gathered(q, tiles, layout.kv_heads), lanes.keys), tiled(rows, lanes.keys))
    }
    if sinks is not None:
        each = jnp.tile(
            sinks.astype(jnp.float32).reshape(layout.kv_heads, 1, -1), (1, tiles.tokens, 1)
        )
        inputs["sinks"] = (
            each.reshape(layout.kv_heads, rows, 1),
            pl.BlockSpec((heads, rows, 1), lambda i, group, *_: (group, 0, 0)),
        )
    first = jnp.minimum(tiles.token, len(q) - 1)
    inputs["new"] = new.k[first].astype(jnp.float32)[:, :, None], tiled(1, lanes.total)
    for name in ("k_scale", "v_scale"):
        if (scale := getattr(new, name)) is not None:
            inputs[f"new_{name}"] = scale[first][..., None, None], tiled(1, 1)
    outputs = {
        "out": _Out(
            (n, layout.kv_heads, rows, lanes.value_lanes), q.dtype, tiled(rows, lanes.value_lanes)
        )
    }
    if options.lse:
        outputs["lse"] = _Out((n, layout.kv_heads, rows, 1), jnp.float32, tiled(rows, 1))
    pools = {name: pool for name, pool in pages._asdict().items() if pool is not None}
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    outputs |= {name: _Out(pool.shape, pool.dtype, in_hbm) for name, pool in pools.items()}
    scalars = scalars_of(ragged, tiles, len(pages.k))
    scratch = _scratch(plan, tuple(pools))

    def kernel(*refs: Any) -> None:
        given = iter(refs)
        scalar_refs = Scalars(*(next(given) for _ in scalars))
        ins = {name: next(given) for name in inputs}
        for _ in pools:
            next(given)  # the same memory as the output
        outs = {name: next(given) for name in outputs}
        held = {name: outs.pop(name) for name in pools}
        Body(plan, scalar_refs, ins, outs, held, dict(zip(scratch, given, strict=True))).run()

    results = pl.pallas_call(
        kernel,
        # The type says where pools lie: by the specification alone XLA would bring small ones to
        # the core, whole.
        out_shape=[
            (pltpu.HBM if name in pools else jax.ShapeDtypeStruct)(out.shape, out.dtype)
            for name, out in outputs.items()
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(n // plan.per_step, layout.kv_heads // heads),
            in_specs=[spec for _, spec in inputs.values()] + [in_hbm] * len(pools),
            out_specs=[out.spec for out in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases={
            len(scalars) + len(inputs) + i: list(outputs).index(name)
            for i, name in enumerate(pools)
        },
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        name="paged_attention",
    )(*scalars, *(x for x, _ in inputs.values()), *pools.values())
    found = dict(zip(outputs, results, strict=True))
    out = by_token(found["out"][..., lanes.out : lanes.out + layout.out_dim], tiles, 0)
    lse = by_token(found["lse"], tiles, -jnp.inf)[..., 0] if options.lse else None
    return Attended(out, Pages(**{name: found.get(name) for name in Pages._fields}), lse)


class _Out(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    spec: pl.BlockSpec


def scalars_of(ragged: Ragged, tiles: Tiles, num_pages: int) -> Scalars:
    sizes = ragged.starts[1:] - ragged.starts[:-1]
    is_kept = ragged.page[jnp.minimum(tiles.token, len(ragged.page) - 1)] < num_pages
    insert = (tiles.count == 1) & (sizes[tiles.row] == 1) & is_kept
    tables = ragged.tables.reshape(-1)
    return Scalars(
        tables, tiles.row, tiles.first, tiles.count, tiles.live, insert.astype(jnp.int32)
    )


def _scratch(plan: Plan, pools: Sequence[str]) -> dict[str, Any]:
    layout = plan.options.layout
    heads = plan.heads
    rows = plan.rows
    total = plan.lanes.total
    found = {
        "acc": pltpu.VMEM((heads, rows, plan.lanes.value_lanes), jnp.float32),
        "peak": pltpu.VMEM((heads, rows, TILE_LANES), jnp.float32),
        "total": pltpu.VMEM((heads, rows, TILE_LANES), jnp.float32),
        "slot": pltpu.SMEM((1,), jnp.int32),
        "arrived": pltpu.SemaphoreType.DMA((2,)),
        "written": pltpu.SemaphoreType.DMA(()),
        "k": pltpu.VMEM((2, heads, plan.block_tokens, total), layout.dtype),
        "new_k": pltpu.VMEM((heads, sublanes(layout.dtype), total), layout.dtype),
    }
    for name in pools:
        if name != "k":
            found[name] = pltpu.VMEM((2, plan.block_pages, heads, 1, layout.page_size), jnp.float32)
            found[f"new_{name}"] = pltpu.VMEM((heads, 1, layout.page_size), jnp.float32)
    return found
