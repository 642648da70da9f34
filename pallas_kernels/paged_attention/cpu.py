"""Paged attention on an x86-64 CPU, by the kernel of jaxserve.cpu_kernels.

Pages lie as in `reference`, but for float8 numbers, which are held as their bits: XLA:CPU widens a
whole pool of them for a scatter. The kernel walks over a row's pages with a tile of up
to 96 query rows of one kv head, which XLA's threads share. Weights are rounded to the queries'
dtype as in `reference`, and products are summed in another order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.cpu_kernels import attention
from jaxserve.cpu_kernels.errors import CpuKernelError
from jaxserve.cpu_kernels.library import load
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.api import (
    Attended,
    Demand,
    KernelError,
    Layout,
    Options,
    Pages,
    Ragged,
)

axes = reference.axes


def check(options: Options, demand: Demand) -> None:
    """Raise KernelError where the kernel does not run, and for dtypes that it does not take."""
    reference.check(options, demand)
    layout = options.layout
    instead = "--attention reference"
    if layout.dtype.name not in attention.PAGES.get(demand.dtype.name, ()):
        raise KernelError(
            f"queries of {demand.dtype} and pages of {layout.dtype}: the CPU kernel supports "
            f"float32 and bfloat16, and pages of as many bits or fewer ({instead})"
        )
    if demand.dtype == jnp.bfloat16 and layout.head_dim % 2:
        raise KernelError(
            f"heads of {layout.head_dim}: in bfloat16 the CPU kernel supports even numbers "
            f"({instead})"
        )
    try:
        load()
    except CpuKernelError as error:
        raise KernelError(f"{error} (or {instead})") from error


def allocate(num_pages: int, layout: Layout) -> Pages:
    """Return zeroed pages."""
    return _bits(reference.allocate(num_pages, layout))


def read(pages: Pages, ids: Int[Array, "n"], layout: Layout) -> Pages:
    """Return copies of the pages `ids` in canonical order."""
    found = reference.read(pages, ids, layout)
    return jax.tree.map(lambda x: x.view(layout.dtype) if x.dtype == jnp.uint8 else x, found)


def write_back(pages: Pages, ids: Int[Array, "n"], canonical: Pages, layout: Layout) -> Pages:
    """Store pages in canonical order; id P, which is out of range, drops its page."""
    return reference.write_back(pages, ids, _bits(canonical), layout)


@jax.enable_x64(False)
def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"] | None,
    pages: Pages,
    ragged: Ragged,
    options: Options,
    sinks: Float[Array, "N"] | None = None,
    instructions: str | None = None,
) -> Attended:
    """Write the new tokens and attend; see `api.PagedAttention.attend`.

    Args:
        instructions: One of library.supported(); the processor's best by default.
    """
    new = _bits(reference.stored(k, v, options.layout.dtype))
    pages = reference.put(pages, new, ragged.page, ragged.offset)
    rows = len(ragged.lengths)
    starts = jnp.arange(rows + 1) if options.max_row_tokens == 1 else ragged.starts
    no_sink = jnp.full(q.shape[1], reference.MASKED)
    out, lse = attention.attend(
        q,
        pages.k,
        pages.v,
        _scales(pages),
        ragged.tables.astype(jnp.int32),
        ragged.lengths.astype(jnp.int32),
        starts.astype(jnp.int32),
        no_sink if sinks is None else sinks.astype(jnp.float32),
        out_dim=options.layout.out_dim,
        scale=options.scale,
        softcap=options.softcap,
        window=options.window,
        instructions=instructions or load().instructions,
    )
    return Attended(out.astype(q.dtype), pages, lse if options.lse else None)


def _bits(pages: Pages) -> Pages:
    """Return float8 numbers as their bits, and others as they are."""

    def bits(x: jax.Array) -> jax.Array:
        return x.view(jnp.uint8) if x.dtype == jnp.float8_e4m3fn else x

    return jax.tree.map(bits, pages)


def _scales(pages: Pages) -> tuple[jax.Array, jax.Array] | None:
    """Return the scales of keys and of values; None where pages have none."""
    if pages.k_scale is None:
        return None
    return pages.k_scale, pages.k_scale if pages.v_scale is None else pages.v_scale
