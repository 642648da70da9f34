"""Paged attention on TPUs, in Pallas.

One walk over pages serves decode steps, prompt chunks and the verification of drafts.

A page keeps a token's key and value side by side in the lanes, so that one copy brings both, for
all kv heads of the shard (`lanes.py`). Work is cut into tiles of query tokens of one row: a single
token in a decode step, up to hundreds otherwise. The kernel walks every tile over exactly the
blocks of pages that its queries see, with a running softmax (FlashAttention-2). While it computes
one block it fetches the next: of the same tile, or the first of the next tile, also across the
steps of the grid. The order of the walk is that of the ragged paged attention kernels of vLLM and
jax; the layout of pages, tiles and writes is new.

A decode step walks all kv heads of a page together, in few and large copies. Chunks are walked one
kv head at a time, so that a tile can have the hundreds of queries that make fetching a page
worthwhile. Of a tile with one token, in a step that has both kinds, only the few rows of that token
are computed.

New tokens: the walk itself puts the token of a row that has one into its last block, and writes the
few sublanes around the token back to the page; no page is read for the sake of the write. Chunks
are written before the walk, page by page (`tpu_write.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.paged_attention import tpu_write
from jaxserve.pallas_kernels.paged_attention.api import (
    Attended,
    Demand,
    KernelError,
    Layout,
    Options,
    Pages,
    Ragged,
)
from jaxserve.pallas_kernels.paged_attention.lanes import (
    TILE_LANES,
    Lanes,
    pack,
    sublanes,
    unpack,
    widen,
)
from jaxserve.pallas_kernels.paged_attention.tiles import (
    Tiles,
    by_token,
    decode_tiles,
    gathered,
    ragged_tiles,
)
from jaxserve.pallas_kernels.paged_attention.tpu_body import Body, Scalars
from jaxserve.pallas_kernels.paged_attention.tpu_plan import Plan, plan_of

SCALAR_BYTES = 2**19  # bytes of scalar memory that page tables may take


def check(options: Options, demand: Demand) -> None:
    """Raise KernelError for page sizes, heads and page tables that the kernel cannot take."""
    layout = options.layout
    kv_heads = layout.kv_heads
    size = layout.page_size
    step = sublanes(layout.dtype)
    if demand.heads % kv_heads:
        raise KernelError(f"{demand.heads} query heads do not divide by {kv_heads} kv heads")
    if layout.scaled:
        step = 128  # a page's scales lie in the lanes of a register, of which there are 128
    if size % step:
        raise KernelError(
            f"pages of {size} tokens of {layout.dtype}: on a TPU the size is a multiple of "
            f"{step} (--page-size, or --attention reference)"
        )
    table = 4 * demand.rows * demand.table_width  # bytes of int32
    if table > SCALAR_BYTES:
        raise KernelError(
            f"page tables of {demand.rows} rows x {demand.table_width} pages take {table} bytes "
            f"of scalar memory; there is room for {SCALAR_BYTES} (--max-batch, --max-context, or "
            f"larger pages: --page-size)"
        )


def axes(layout: Layout) -> Pages:
    """Return the axis letters of the pages' arrays, K being the dimension split over shards."""
    scale = "PK_Z" if layout.scaled else None
    if layout.value_dim is None:
        return Pages("PKZ_", None, scale, scale)
    return Pages("P_Z_", None, scale and "P__Z", None)  # one head, for every shard


@jax.enable_x64(False)
def allocate(num_pages: int, layout: Layout) -> Pages:
    """Return zeroed pages: k [P, K, Z, C], with a token's key and value side by side in C lanes.

    Lanes that hold neither stay 0. Scales are [P, K, 1, Z]: a copy may begin at any head only if
    heads are not among the last two dimensions, which are tiled.
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
    """Return copies of the pages `ids` in canonical order."""
    k, v = unpack(pages.k[ids].swapaxes(1, 2), layout)
    scales = [
        None if pool is None else pool[ids][:, :, 0].swapaxes(1, 2)
        for pool in (pages.k_scale, pages.v_scale)
    ]
    return Pages(k, v, *scales)


def write_back(pages: Pages, ids: Int[Array, "n"], canonical: Pages, layout: Layout) -> Pages:
    """Store pages in canonical order; id P drops its page."""
    k = pack(canonical.k, canonical.v, layout).swapaxes(1, 2)
    scales = [
        None if x is None else x.swapaxes(1, 2)[:, :, None]
        for x in (canonical.k_scale, canonical.v_scale)
    ]
    return jax.tree.map(
        lambda pool, x: tpu_write.put_pages(pool, ids, x), pages, Pages(k, None, *scales)
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
    """Write the new tokens and attend; see `api.PagedAttention.attend`."""
    new = tpu_write.stored(k, v, options.layout)
    plan = plan_of(options, q.shape[1], len(ragged.lengths), len(q), ragged.tables.shape[1])
    if options.max_row_tokens != 1:
        pages = tpu_write.write_chunks(pages, new, ragged, options.layout)
    return _walk(q, new, pages, ragged, tiles_of(ragged, plan, len(q)), plan, sinks)


def tiles_of(ragged: Ragged, plan: Plan, num_tokens: int) -> Tiles:
    """Return the step's tiles, as many as fill the steps of the grid."""
    tiles = (
        decode_tiles(ragged)
        if plan.options.max_row_tokens == 1
        else ragged_tiles(ragged, num_tokens, plan.tokens)
    )
    return tiles.padded_to(plan.per_step)


class _Input(NamedTuple):
    """An operand of the kernel, and the part of it that a step of the grid sees."""

    array: jax.Array
    spec: pl.BlockSpec


class _Output(NamedTuple):
    """A result of the kernel, and the part of it that a step of the grid sees."""

    shape: tuple[int, ...]
    dtype: Any
    spec: pl.BlockSpec


def _walk(
    q: jax.Array,
    new: Pages,
    pages: Pages,
    ragged: Ragged,
    tiles: Tiles,
    plan: Plan,
    sinks: jax.Array | None,
) -> Attended:
    """Call the kernel: attend from the tiles' queries, and store the tokens of rows that have one.

    Args:
        new: The step's tokens as pages hold them, see `tpu_write.stored`.
    """
    options = plan.options
    layout = options.layout
    lanes = plan.lanes
    inputs = _inputs(q, new, tiles, plan, sinks)
    outputs = _outputs(len(tiles.row), q.dtype, plan)
    pools = {name: pool for name, pool in pages._asdict().items() if pool is not None}
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    outputs |= {name: _Output(pool.shape, pool.dtype, in_hbm) for name, pool in pools.items()}
    scalars = scalars_of(ragged, tiles, len(pages.k))
    scratch = _scratch(plan, tuple(pools))

    results = pl.pallas_call(
        _kernel(plan, len(scalars), tuple(inputs), tuple(outputs), tuple(pools), tuple(scratch)),
        # The type says where pools lie: by the specification alone XLA would bring small ones to
        # the core, whole.
        out_shape=[
            (pltpu.HBM if name in pools else jax.ShapeDtypeStruct)(out.shape, out.dtype)
            for name, out in outputs.items()
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(len(tiles.row) // plan.per_step, layout.kv_heads // plan.heads),
            in_specs=[x.spec for x in inputs.values()] + [in_hbm] * len(pools),
            out_specs=[out.spec for out in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        # Pools are updated in place; inputs are counted from the scalars on.
        input_output_aliases={
            len(scalars) + len(inputs) + i: list(outputs).index(name)
            for i, name in enumerate(pools)
        },
        # The steps of the grid depend on each other: each finds its first block already fetched.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        name="paged_attention",
    )(*scalars, *(x.array for x in inputs.values()), *pools.values())
    found = dict(zip(outputs, results, strict=True))
    out = by_token(found["out"][..., lanes.out : lanes.out + layout.out_dim], tiles, 0)
    lse = by_token(found["lse"], tiles, -jnp.inf)[..., 0] if options.lse else None
    return Attended(out, Pages(**{name: found.get(name) for name in Pages._fields}), lse)


def _kernel(
    plan: Plan,
    num_scalars: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    pools: Sequence[str],
    scratch: Sequence[str],
) -> Callable[..., None]:
    """Return the kernel, which knows its references by these names.

    The names in `outputs` include the pools, which are operands and results.
    """

    def kernel(*refs: Any) -> None:
        # Pallas passes scalars, inputs, outputs and scratch memory, in this order.
        given = iter(refs)
        scalar_refs = Scalars(*(next(given) for _ in range(num_scalars)))
        input_refs = {name: next(given) for name in inputs}
        for _ in pools:
            next(given)  # a pool as an input: aliased, so the same memory as the output
        output_refs = {name: next(given) for name in outputs}
        pool_refs = {name: output_refs.pop(name) for name in pools}
        scratch_refs = dict(zip(scratch, given, strict=True))
        Body(plan, scalar_refs, input_refs, output_refs, pool_refs, scratch_refs).run()

    return kernel


def _tiled(plan: Plan, *shape: int) -> pl.BlockSpec:
    """Return the blocks of an array [n, K, *shape]: a grid step's tiles and kv heads."""
    return pl.BlockSpec(
        (plan.per_step, plan.heads, *shape), lambda i, group, *_: (i, group, *(0 for _ in shape))
    )


def _inputs(
    q: jax.Array, new: Pages, tiles: Tiles, plan: Plan, sinks: jax.Array | None
) -> dict[str, _Input]:
    """Return the kernel's operands by name, but for scalars and pools; see `Body`."""
    layout = plan.options.layout
    lanes = plan.lanes
    rows = plan.rows
    inputs = {
        "q": _Input(
            widen(gathered(q, tiles, layout.kv_heads), lanes.keys), _tiled(plan, rows, lanes.keys)
        )
    }
    if sinks is not None:
        each = jnp.tile(
            sinks.astype(jnp.float32).reshape(layout.kv_heads, 1, -1), (1, tiles.tokens, 1)
        )
        inputs["sinks"] = _Input(
            each.reshape(layout.kv_heads, rows, 1),
            pl.BlockSpec((plan.heads, rows, 1), lambda i, group, *_: (group, 0, 0)),
        )
    # Dead tiles may name a token behind the last one; what they bring is not read.
    first = jnp.minimum(tiles.token, len(q) - 1)
    # The kernel merges the new token into its neighbours' tile of memory in float32.
    inputs["new"] = _Input(
        new.k[first].astype(jnp.float32)[:, :, None], _tiled(plan, 1, lanes.total)
    )
    for name in ("k_scale", "v_scale"):
        scale = getattr(new, name)
        if scale is not None:
            inputs[f"new_{name}"] = _Input(scale[first][..., None, None], _tiled(plan, 1, 1))
    return inputs


def _outputs(num_tiles: int, dtype: jnp.dtype, plan: Plan) -> dict[str, _Output]:
    """Return the kernel's results by name, but for pools; see `Body`."""
    heads = plan.options.layout.kv_heads
    wide = plan.lanes.value_lanes
    outputs = {
        "out": _Output((num_tiles, heads, plan.rows, wide), dtype, _tiled(plan, plan.rows, wide))
    }
    if plan.options.lse:
        outputs["lse"] = _Output(
            (num_tiles, heads, plan.rows, 1), jnp.float32, _tiled(plan, plan.rows, 1)
        )
    return outputs


def scalars_of(ragged: Ragged, tiles: Tiles, num_pages: int) -> Scalars:
    """Return the arrays that the kernel reads from scalar memory."""
    sizes = ragged.starts[1:] - ragged.starts[:-1]
    # A token whose page is out of range is not stored: its row had ended before this step.
    is_kept = ragged.page[jnp.minimum(tiles.token, len(ragged.page) - 1)] < num_pages
    insert = (tiles.count == 1) & (sizes[tiles.row] == 1) & is_kept
    tables = ragged.tables.reshape(-1)
    return Scalars(
        tables, tiles.row, tiles.first, tiles.count, tiles.live, insert.astype(jnp.int32)
    )


def _scratch(plan: Plan, pools: Sequence[str]) -> dict[str, Any]:
    """Return the kernel's memory on the chip by name; see `Body`."""
    layout = plan.options.layout
    heads = plan.heads
    rows = plan.rows
    total = plan.lanes.total
    # Two blocks of each pool, so that one is fetched while the other is computed.
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
