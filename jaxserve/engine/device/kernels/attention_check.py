"""Start-up check of the attention kernel against the reference, on the device that serves.

Tests run kernels in interpreters and compile them for absent chips. What a device, a driver or
another version of the compiler makes of a kernel shows here, before any request is answered.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.device.kernels.agreement import require_agreement
from jaxserve.pallas_kernels import dispatch
from jaxserve.pallas_kernels.paged_attention.api import (
    LARGEST,
    Layout,
    Options,
    PagedAttention,
    Pages,
    Ragged,
    quantize,
)

# Absolute, by dtype of queries. Results are averages of numbers around 1, and both sides round
# them as well as the attention weights.
BOUNDS = {jnp.dtype(jnp.bfloat16): 0.04, jnp.dtype(jnp.float32): 1e-3}
OWN_PAGES = 3  # pages of a row behind those that it shares with others


class Extent(NamedTuple):
    """Size of the trial: its rows, and the pages of the prefix that its long rows share."""

    rows: int
    shared_pages: int

    @staticmethod
    def of(device: Any, page_size: int) -> "Extent":
        """Choose an extent for a device.

        An accelerator gets more than its kernel has buffers for at a time, so that buffers are
        used again. A CPU gets little, since kernels run in interpreters there.
        """
        if device.platform == "cpu":
            return Extent(4, 2)
        return Extent(max(8, min(48, 3072 // page_size)), -(-2048 // page_size))


@jax.enable_x64(False)
def check_attention(
    name: str, steps: Iterable[Options], heads: int, dtype: jnp.dtype, device: Any
) -> None:
    """Raise EngineError when the kernel `name` and the reference differ in one of these steps.

    Args:
        heads: Number of query heads of one shard.
        dtype: Dtype of queries.
    """
    with jax.default_device(device):
        for options in steps:
            extent = Extent.of(device, options.layout.page_size)
            ours = _attend(dispatch.IMPLEMENTATIONS[name], options, heads, dtype, extent)
            theirs = _attend(dispatch.IMPLEMENTATIONS["reference"], options, heads, dtype, extent)
            difference = max(_difference(a, b) for a, b in zip(ours, theirs, strict=True))
            subject = f"attention {name!r} in {_step_name(options)}"
            require_agreement(subject, difference, BOUNDS[dtype], "--attention", device)


def _step_name(options: Options) -> str:
    if options.max_row_tokens == 1:
        return "a decode step"
    return "a step of prompts" if options.max_row_tokens is None else "a verification"


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference, infinite where one array alone has a NaN."""
    if (np.isnan(a) != np.isnan(b)).any():
        return np.inf
    return float(np.nan_to_num(np.abs(np.float32(a) - np.float32(b))).max())


def _attend(
    kernel: PagedAttention, options: Options, heads: int, dtype: jnp.dtype, extent: Extent
) -> list[np.ndarray]:
    """Run one step over rows that begin and end at, before and behind borders of pages.

    Returns the attention output and the canonical contents of all pages afterwards. Inputs are the
    same for every kernel. Slots that no query may read hold NaN, if pages can hold it.
    """
    layout = options.layout
    rng = np.random.default_rng(0)
    cached, new = _rows(options, extent)
    tables = _tables(cached, extent, layout.page_size)
    ids = jnp.asarray(np.arange(extent.shared_pages + OWN_PAGES * extent.rows, dtype=np.int32))

    def vectors(*shape: int) -> np.ndarray:
        return rng.standard_normal((*shape, layout.head_dim), np.float32)

    def storable(*shape: int) -> np.ndarray:
        """Draw vectors that pages hold exactly, so that a different rounding is no difference."""
        drawn = vectors(*shape)
        return _of_eight_bits(drawn, layout.dtype, rng) if layout.scaled else drawn

    q = jnp.asarray(vectors(sum(new), heads), dtype)
    k, v = (jnp.asarray(storable(sum(new), layout.kv_heads), dtype) for _ in "kv")
    pools = [storable(len(ids), layout.page_size, layout.kv_heads) for _ in "kv"]
    if not layout.scaled:
        for row, before in enumerate(cached):
            own, begin = divmod(before, layout.page_size)
            for pool in pools:
                pool[tables[row, own], begin:] = np.nan
                pool[tables[row, own + 1 : own + OWN_PAGES]] = np.nan
    canonical = _canonical([jnp.asarray(pool, dtype) for pool in pools], layout)
    pages = kernel.write_back(kernel.allocate(len(ids), layout), ids, canonical, layout)
    attend = jax.jit(partial(kernel.attend, options=options), donate_argnums=3)
    ragged = _ragged(cached, new, tables, layout.page_size)
    done = jax.block_until_ready(attend(q, k, v if layout.keeps_values else None, pages, ragged))
    contents = _unscaled(kernel.read(done.pages, ids, layout))
    return [np.asarray(x) for x in (done.out, *contents)]


def _of_eight_bits(x: np.ndarray, dtype: jnp.dtype, rng: np.random.Generator) -> np.ndarray:
    """Round vectors to numbers that both bfloat16 and pages of this dtype hold exactly.

    Scales of vectors differ by powers of 2, so that a kernel that mixes them up is found.
    """
    numbers = np.asarray(quantize(jnp.asarray(x), dtype)[0], np.float32)
    largest = np.ceil(np.log2(LARGEST[dtype]))
    return numbers * 2.0 ** (rng.integers(0, 3, (*x.shape[:-1], 1)) - largest)


def _unscaled(canonical: Pages) -> list[jax.Array]:
    """Return the arrays of pages, those of 8 bits times their scales."""
    pools = ((canonical.k, canonical.k_scale), (canonical.v, canonical.v_scale))
    return [
        x if scale is None else x.astype(jnp.float32) * scale[..., None]
        for x, scale in pools
        if x is not None
    ]


def _rows(options: Options, extent: Extent) -> tuple[list[int], list[int]]:
    """Return the numbers of cached and of new tokens of every row.

    Three rows of four have the long shared prefix. Kernels want rows with one new token first.
    """
    size = options.layout.page_size
    long = extent.shared_pages * size
    half = long + size // 2
    before = [0, long, long + size - 1, long + 1, size - 1, half, half + 1, long + 2]
    cached = [before[row % len(before)] for row in range(extent.rows)]
    most = options.max_row_tokens
    if most == 1:
        return cached, [1] * extent.rows
    longest = (7, size + 5) if most is None else (most, -(-most // 2))
    new = [1 if row < extent.rows // 3 else longest[row % 2] for row in range(extent.rows)]
    return cached, new


def _tables(cached: list[int], extent: Extent, size: int) -> np.ndarray:
    """Make the rows' page tables: shared pages that nothing is written to, then own ones.

    Entries behind them are 0, a page that exists.
    """
    tables = np.zeros((extent.rows, extent.shared_pages + OWN_PAGES), np.int32)
    for row, before in enumerate(cached):
        whole = before // size
        first = extent.shared_pages + OWN_PAGES * row
        tables[row, : whole + OWN_PAGES] = [*range(whole), *range(first, first + OWN_PAGES)]
    return tables


def _canonical(pools: list[jax.Array], layout: Layout) -> Pages:
    k, v = pools
    if not layout.scaled:
        return Pages(k, v if layout.keeps_values else None)
    k, k_scale = quantize(k, layout.dtype)
    if not layout.keeps_values:
        return Pages(k, None, k_scale)
    v, v_scale = quantize(v, layout.dtype)
    return Pages(k, v, k_scale, v_scale)


def _ragged(cached: list[int], new: list[int], tables: np.ndarray, size: int) -> Ragged:
    row = np.repeat(np.arange(len(new)), new)
    position = np.concatenate(
        [np.arange(before, before + n) for before, n in zip(cached, new, strict=True)]
    )
    fields = {
        "tables": tables,
        "lengths": np.add(cached, new),
        "starts": np.cumsum([0, *new]),
        "split": [new.count(1), len(new)],
        "page": tables[row, position // size],
        "offset": position % size,
    }
    return Ragged(**{name: jnp.asarray(field, jnp.int32) for name, field in fields.items()})
