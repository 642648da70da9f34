"""Paged attention on NVIDIA's Hopper, in Pallas (Mosaic GPU).

Pages lie as in `reference`: [P, K, Z, H]. Tiles of query tokens walk over exactly the pages that
they see (`gpu_body.py`). A row with few tokens, above all a decode, reads many pages for little
work: it is split into parts, so that few rows too keep the whole GPU busy, and the results of the
parts are merged (`gpu_work.py`). Of rows with many tokens every fetched page serves 128 query rows.
A step that has both kinds walks twice, unless it is small: then all rows are split.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jaxserve.pallas_kernels.hopper import HOPPER, WARPGROUP_ROWS, tiled
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.api import (
    Attended,
    Demand,
    KernelError,
    Options,
    Pages,
    Ragged,
)
from jaxserve.pallas_kernels.paged_attention.gpu_body import Body
from jaxserve.pallas_kernels.paged_attention.gpu_plan import (
    Plan,
    Sizes,
    few_plan,
    few_tokens,
    many_plan,
)
from jaxserve.pallas_kernels.paged_attention.gpu_refs import Inputs, Outputs, Raw, Shared
from jaxserve.pallas_kernels.paged_attention.gpu_work import Units, merged, units_of
from jaxserve.pallas_kernels.paged_attention.tiles import (
    Tiles,
    by_token,
    decode_tiles,
    gathered,
    ragged_tiles,
    single_tiles,
)

HEAD_DIMS: Final = (64, 128, 192, 256)
# A step of up to so many one-warpgroup tiles is walked by one-warpgroup tiles only. They may be
# split over thread blocks, which few tiles on long contexts need to keep the GPU busy.
SMALL_STEP: Final = 16

axes = reference.axes
allocate = reference.allocate
read = reference.read
write_back = reference.write_back


def check(options: Options, demand: Demand) -> None:
    """Raise KernelError for chips, dtypes and sizes that the kernel cannot take."""
    layout = options.layout
    heads = demand.heads
    instead = "--attention reference"
    if options.device_kind.startswith("NVIDIA") and not HOPPER.match(options.device_kind):
        raise KernelError(
            f"the GPU kernel is written for Hopper (H100, H200); this is {options.device_kind} "
            f"({instead})"
        )
    if heads % layout.kv_heads:
        raise KernelError(f"{heads} query heads do not divide by {layout.kv_heads} kv heads")
    if demand.dtype != jnp.bfloat16 or not (layout.scaled or layout.dtype == jnp.bfloat16):
        raise KernelError(
            f"queries of {demand.dtype} and pages of {layout.dtype}: the GPU kernel supports "
            f"bfloat16 for both, or pages of 8 bits (--dtype bfloat16 or --kv, or {instead})"
        )
    if layout.value_dim is None and layout.head_dim not in HEAD_DIMS:
        raise KernelError(
            f"heads of {layout.head_dim}: the GPU kernel supports {HEAD_DIMS} ({instead})"
        )
    if layout.value_dim is not None and (
        layout.scaled or layout.head_dim % 64 or layout.value_dim % 128
    ):
        raise KernelError(
            f"latent pages of {layout.head_dim} numbers in {layout.dtype}, {layout.value_dim} of "
            f"them the value: the GPU kernel supports multiples of 64 and of 128, in bfloat16 "
            f"(--kv bfloat16, or {instead})"
        )
    # A copy of scales, 4 bytes a token, begins at a multiple of 128 bytes of shared memory.
    step = 32 if layout.scaled else 16
    if layout.page_size % step:
        raise KernelError(
            f"pages of {layout.page_size} tokens of {layout.dtype}: on a GPU the size is a "
            f"multiple of {step} (--page-size, or {instead})"
        )
    # The plans raise KernelError where two blocks do not fit into shared memory.
    few_plan(options, heads, demand.rows, 1, demand.table_width * layout.page_size)
    many_plan(options, heads)


@jax.enable_x64(False)
def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pages: Pages,
    ragged: Ragged,
    options: Options,
    sinks: Float[Array, "N"] | None = None,
    few_sizes: Sizes | None = None,
    many_sizes: Sizes | None = None,
) -> Attended:
    """Write the new tokens and attend; see `api.PagedAttention.attend`.

    `few_sizes` and `many_sizes` are used in place of the table's, to tune them.
    """
    pages = reference.write(pages, k, v, ragged.page, ragged.offset)
    heads = q.shape[1]
    row_tokens = options.max_row_tokens or len(q)
    context = ragged.tables.shape[1] * options.layout.page_size
    few = few_tokens(options, heads)

    def plan_few(tiles: Tiles) -> Plan:
        """Return the plan of tiles that one warpgroup multiplies."""
        return few_plan(options, heads, len(tiles.row), tiles.tokens, context, few_sizes)

    if row_tokens <= few or len(q) <= SMALL_STEP * few:
        tiles = (
            decode_tiles(ragged)
            if options.max_row_tokens == 1
            else ragged_tiles(ragged, len(q), min(few, row_tokens))
        )
        out, lse = _walk(q, pages, ragged, tiles, plan_few(tiles), sinks)
    else:
        # Rows with one token, which come first, and rows with more are walked separately.
        tiles = single_tiles(ragged, len(q))
        plan = many_plan(options, heads, many_sizes)
        one = _walk(q, pages, ragged, tiles, plan_few(tiles), sinks)
        many = _walk(
            q, pages, ragged, ragged_tiles(ragged, len(q), plan.tokens, least=2), plan, sinks
        )
        is_one = (jnp.arange(len(q)) < ragged.split[0])[:, None]
        out = jnp.where(is_one[..., None], one[0], many[0])
        lse = jnp.where(is_one, one[1], many[1])
    return Attended(out, pages, lse if options.lse else None)


def _walk(
    q: jax.Array, pages: Pages, ragged: Ragged, tiles: Tiles, plan: Plan, sinks: jax.Array | None
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Return attention (out, lse) for the queries of these tiles.

    Other tokens have 0 and -inf.
    """
    used = plan.tokens * plan.groups  # the rows behind are padding, up to what is copied at once
    units, parts = units_of(tiles, plan)
    behind = ((0, 0), (0, 0), (0, plan.rows - used), (0, 0))
    out, lse = _call(
        units, ragged.tables, jnp.pad(gathered(q, tiles, plan.heads), behind), pages, plan
    )
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(plan.heads, -1), (1, plan.tokens))
    out, lse = merged(out[:, :, :used], lse[:, :, :used], parts, sinks)
    by_query = by_token(out, tiles, 0).astype(q.dtype)
    return by_query, by_token(lse[..., None], tiles, -jnp.inf)[..., 0]


def _call(
    units: Units, tables: jax.Array, q: Float[Array, "n K M H"], pages: Pages, plan: Plan
) -> tuple[Float[Array, "n*S K M H"], Float[Array, "n*S K M"]]:
    """Call the kernel: return out and lse of every unit's place, of split tiles part by part."""
    dim = plan.options.layout.out_dim
    shape = (len(units.row), plan.heads, plan.rows)
    inputs = (*units, tables, q, *(pool for pool in pages if pool is not None))

    def paged_attention(*refs: Any) -> None:
        input_refs = refs[: len(inputs)]
        output_refs = refs[len(inputs) : len(inputs) + 2]
        shared = refs[len(inputs) + 2 :]
        operands = Inputs(Units(*input_refs[: len(units)]), *input_refs[len(units) :])
        buffers = Shared(*shared)
        if plan.is_latent:
            buffers = buffers._replace(v=buffers.k)
        Body(plan, operands, Outputs(*output_refs), buffers).run()

    out, lse = plgpu.kernel(
        paged_attention,  # the name that profiles show
        out_type=(
            jax.ShapeDtypeStruct(
                (*shape, dim), jnp.float32 if plan.splits > 1 or plan.is_latent else q.dtype
            ),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch_types=_scratch(plan, q.dtype),
        grid=(plan.cores * plan.per_core,),
        grid_names=("block",),
        num_threads=plan.warpgroups + plan.has_fetcher,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(*inputs)
    return out, lse


def _scratch(plan: Plan, dtype: jnp.dtype) -> Shared:
    """Return the shared memory and barriers of a thread block."""
    dim = plan.options.layout.head_dim
    w = plan.warpgroups
    s = plan.stages
    rows = WARPGROUP_ROWS * (1 if plan.is_latent else w)
    buffers = tiled((s, plan.block_tokens, dim), dtype)
    scaled = plan.options.layout.scaled
    # A buffer is full when all its pieces have landed, or when the fetcher has converted it; it is
    # free when every warpgroup that multiplies is done with it.
    fetched = plgpu.Barrier(num_arrivals=1 if scaled else plan.pieces, num_barriers=s)
    done = plgpu.Barrier(num_arrivals=w, num_barriers=s)
    return Shared(
        q=tiled((rows, dim), dtype),
        k=buffers,
        v=None if plan.is_latent else buffers,
        lse=plgpu.SMEM((rows,), jnp.float32),
        q_full=plgpu.Barrier(),
        q_free=plgpu.Barrier(num_arrivals=w),
        k_full=fetched,
        k_free=done,
        v_full=fetched,
        v_free=done,
        cleared=plgpu.Barrier(num_barriers=s),
        scored=done,
        raw=_raw(plan) if scaled else None,
        out=tiled((rows, plan.result_columns), jnp.dtype(jnp.float32)) if plan.has_parts else None,
        weights=tiled((w, WARPGROUP_ROWS, plan.block_tokens), dtype) if plan.interpreted else None,
    )


def _raw(plan: Plan) -> Raw:
    """Return the shared memory that 8-bit pages are copied to."""
    layout = plan.options.layout
    s = plan.stages
    numbers = tiled((s, plan.block_tokens, layout.head_dim), layout.dtype)
    scales = plgpu.SMEM((s, plan.block_tokens), jnp.float32)
    landed = plgpu.Barrier(num_arrivals=2 * plan.pieces, num_barriers=s)
    return Raw(numbers, numbers, scales, scales, landed, landed)
