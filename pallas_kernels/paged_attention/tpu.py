"""Paged attention on TPUs, in Pallas: one walk over pages for decode steps, prompt chunks and verified drafts alike.

A page keeps a token's key and value side by side in the lanes, so that one copy brings both, for all kv heads of the
shard (`lanes.py`). Work comes in tiles: a few query tokens of one row (one, in a decode step). The kernel walks every
tile over the blocks of pages that its queries see and nothing else, with a running softmax (FlashAttention-2), and
while it computes one block it fetches the next: of the same tile, or the first of the next tile, also across the
steps of the grid. The order of the walk is that of the ragged paged attention kernels of vLLM and jax; pages, tiles
and writes are laid out anew.

New tokens: in a decode step the walk itself puts each row's token into its last block and writes back the few
sublanes around it, so that no page is read for the sake of writing. Chunks are written before the walk, page by page
(`tpu_write.py`).
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import tpu_write
from pallas_kernels.paged_attention.api import Attended, Demand, KernelError, Layout, Options, Pages, Ragged
from pallas_kernels.paged_attention.lanes import LANES, Lanes, pack, sublanes, unpack, widen
from pallas_kernels.paged_attention.tiles import Tiles, by_token, decode_tiles, gathered, ragged_tiles
from pallas_kernels.paged_attention.tpu_body import Body, Plan, Scalars

SCALAR_BYTES = 2**19  # of scalar memory for page tables
BUFFER_BYTES = 2**22  # of vector memory for two blocks of pages
BLOCK_TOKENS = 512  # kv positions per block, at most
QUERY_ROWS = 128  # of a tile and one kv head, about: what a matrix unit takes at once
DECODE_ROWS = 8  # tiles per step of the grid where each has one query


def check(options: Options, demand: Demand) -> None:
    layout = options.layout
    kv_heads, size, step = layout.kv_heads, layout.page_size, sublanes(layout.dtype)
    if demand.heads % kv_heads:
        raise KernelError(f"{demand.heads} query heads do not divide by {kv_heads} kv heads")
    if layout.scaled:
        step = 128  # scales lie in the lanes
    if size % step:
        raise KernelError(
            f"pages of {size} tokens of {layout.dtype}: on a TPU the size is a multiple of {step} (--page-size, or "
            "--attention reference)"
        )
    if (table := 4 * demand.rows * demand.table_width) > SCALAR_BYTES:
        raise KernelError(
            f"page tables of {demand.rows} rows x {demand.table_width} pages take {table} bytes of scalar memory; "
            f"there is room for {SCALAR_BYTES} (--max-batch, --max-context, or larger pages: --page-size)"
        )


def axes(layout: Layout) -> Pages:
    scale = "PKZ" if layout.scaled else None
    if layout.value_dim is None:
        return Pages("PKZ_", None, scale, scale)
    return Pages("P_Z_", None, scale and "P_Z", None)  # one head, for every shard


def allocate(num_pages: int, layout: Layout) -> Pages:
    """k: [P, K, Z, C], key and value beside each other in C lanes. The lanes that neither has stay 0."""
    heads = (num_pages, layout.kv_heads, layout.page_size)

    def scale() -> jax.Array:
        return jnp.zeros(heads, jnp.float32)

    k = jnp.zeros((*heads, Lanes.of(layout).total), layout.dtype)
    if not layout.scaled:
        return Pages(k)
    return Pages(k, None, scale(), scale() if layout.value_dim is None else None)


def read(pages: Pages, ids: Int[Array, "n"], layout: Layout) -> Pages:
    """In canonical order."""
    found = jax.tree.map(lambda pool: pool[ids].swapaxes(1, 2), pages)
    return Pages(*unpack(found.k, layout), found.k_scale, found.v_scale)


def write_back(pages: Pages, ids: Int[Array, "n"], canonical: Pages, layout: Layout) -> Pages:
    packed = Pages(pack(canonical.k, canonical.v, layout), None, canonical.k_scale, canonical.v_scale)
    return jax.tree.map(lambda pool, x: pool.at[ids].set(x.swapaxes(1, 2), mode="drop"), pages, packed)


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
    if options.most == 1:
        tiles, per_step = decode_tiles(ragged), DECODE_ROWS
    else:
        pages, new = tpu_write.write_chunks(pages, new, ragged, options.layout), None
        tiles, per_step = ragged_tiles(ragged, len(q), _tile_tokens(q, options)), 1
    return _walk(q, new, pages, ragged, tiles.padded_to(per_step), options, sinks, per_step)


def _tile_tokens(q: jax.Array, options: Options) -> int:
    """A power of two."""
    groups = q.shape[1] // options.layout.kv_heads
    wanted = min(max(1, QUERY_ROWS // groups), options.most or len(q))
    return pl.next_power_of_2(wanted) if options.most else 1 << (wanted.bit_length() - 1)


def _block_pages(layout: Layout, table_width: int) -> int:
    token_bytes = layout.kv_heads * Lanes.of(layout).total * layout.dtype.itemsize
    tokens = min(BLOCK_TOKENS, BUFFER_BYTES // 2 // token_bytes)
    return max(1, min(tokens // layout.page_size, table_width))


def _walk(
    q: jax.Array,
    new: Pages | None,
    pages: Pages,
    ragged: Ragged,
    tiles: Tiles,
    options: Options,
    sinks: jax.Array | None,
    per_step: int,
) -> Attended:
    layout = options.layout
    lanes, width = Lanes.of(layout), ragged.tables.shape[1]
    plan = Plan(options, lanes, _block_pages(layout, width), per_step, tiles.tokens, width)
    queries = _query_tiles(q, tiles, layout)
    n, kv_heads, rows, _ = queries.shape
    insert = jnp.zeros(n, jnp.int32)
    if new is not None:
        insert = insert.at[: len(ragged.page)].set((ragged.page < len(pages.k)).astype(jnp.int32))
    scalars = Scalars(ragged.tables.reshape(-1), tiles.row, tiles.first, tiles.count, tiles.live, insert)

    def tiled(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((per_step, *shape), lambda i, *_: (i, *(0 for _ in shape)))

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    inputs: dict[str, tuple[jax.Array, pl.BlockSpec]] = {"q": (queries, tiled(kv_heads, rows, lanes.keys))}
    if sinks is not None:
        inputs["sinks"] = (
            _sink_rows(sinks, tiles.tokens, kv_heads, rows),
            pl.BlockSpec((kv_heads, rows, 1), lambda *_: (0, 0, 0)),
        )
    if new is not None:
        inputs["new"] = (_per_tile(new.k.astype(jnp.float32), n), tiled(kv_heads, lanes.total))
        for name in ("k_scale", "v_scale"):
            if (scale := getattr(new, name)) is not None:
                inputs[f"new_{name}"] = (_per_tile(scale[..., None], n), tiled(kv_heads, 1))
    pools = {name: pool for name, pool in pages._asdict().items() if pool is not None}
    outputs = {"out": (jax.ShapeDtypeStruct((n, kv_heads, rows, lanes.value_lanes), q.dtype), tiled(kv_heads, rows, lanes.value_lanes))}
    if options.lse:
        outputs["lse"] = (jax.ShapeDtypeStruct((n, kv_heads, rows, 1), jnp.float32), tiled(kv_heads, rows, 1))
    scratch = {
        "acc": pltpu.VMEM((kv_heads, rows, lanes.value_lanes), jnp.float32),
        "peak": pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
        "total": pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
        "slot": pltpu.SMEM((1,), jnp.int32),
        "arrived": pltpu.SemaphoreType.DMA((2,)),
        "written": pltpu.SemaphoreType.DMA(()),
        "k": pltpu.VMEM((2, kv_heads, plan.block_tokens, lanes.total), layout.dtype),
    }
    if new is not None:
        scratch["new_k"] = pltpu.VMEM((kv_heads, sublanes(layout.dtype), lanes.total), layout.dtype)
    for name in ("k_scale", "v_scale"):
        if name in pools:
            if new is not None:
                scratch[f"new_{name}"] = pltpu.VMEM((kv_heads, layout.page_size), jnp.float32)
            scratch[name] = pltpu.VMEM((2, plan.block_pages, kv_heads, layout.page_size), jnp.float32)

    def kernel(*refs):  # noqa: ANN002
        refs = iter(refs)
        given = Scalars(*(next(refs) for _ in scalars))
        ins = {name: next(refs) for name in inputs}
        for _ in pools:
            next(refs)  # the same memory as the output
        outs = {name: next(refs) for name in outputs}
        held = {name: next(refs) for name in pools}
        work = dict(zip(scratch, refs, strict=True))
        Body(plan, given, ins, outs, held, work).run()

    first_pool = len(scalars) + len(inputs)
    found = pl.pallas_call(
        kernel,
        out_shape=[shape for shape, _ in outputs.values()] + [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in pools.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(n // per_step,),
            in_specs=[spec for _, spec in inputs.values()] + [in_hbm] * len(pools),
            out_specs=[spec for _, spec in outputs.values()] + [in_hbm] * len(pools),
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases={first_pool + i: len(outputs) + i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="paged_attention",
    )(*scalars, *(x for x, _ in inputs.values()), *pools.values())
    found = dict(zip([*outputs, *pools], found, strict=True))
    out = by_token(_live_rows(found["out"], tiles, q, layout)[..., lanes.out : lanes.out + layout.out_dim], tiles, 0)
    lse = None
    if options.lse:
        lse = by_token(_live_rows(found["lse"], tiles, q, layout), tiles, -jnp.inf)[..., 0]
    return Attended(out, Pages(**{name: found.get(name) for name in Pages._fields}), lse)


def _query_tiles(q: jax.Array, tiles: Tiles, layout: Layout) -> Float[Array, "n K M C"]:
    """M filled up to whole tiles of memory."""
    found = widen(gathered(q, tiles, layout.kv_heads), Lanes.of(layout).keys)
    return jnp.pad(found, ((0, 0), (0, 0), (0, -found.shape[2] % sublanes(q.dtype)), (0, 0)))


def _live_rows(x: Float[Array, "n K M V"], tiles: Tiles, q: jax.Array, layout: Layout) -> Float[Array, "n K m V"]:
    """Without the rows that fill up."""
    return x[:, :, : tiles.tokens * (q.shape[1] // layout.kv_heads)]


def _sink_rows(sinks: Float[Array, "N"], tokens: int, kv_heads: int, rows: int) -> Float[Array, "K M 1"]:
    each = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, -1), tokens, axis=1)
    return jnp.pad(each, ((0, 0), (0, rows - each.shape[1])))[..., None]


def _per_tile(x: jax.Array, n: int) -> jax.Array:
    return jnp.pad(x, [(0, n - len(x))] + [(0, 0)] * (x.ndim - 1))
