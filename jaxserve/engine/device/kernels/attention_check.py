"""Before anything is answered: this engine's attention beside the reference, on the device that
will run it.

Kernels are proved in interpreters and by compilers. What a device, a driver or another version
makes of them shows here, in seconds, and not in somebody's text.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import EngineError
from pallas_kernels import dispatch
from pallas_kernels.paged_attention.api import (
    EIGHT_BITS,
    Layout,
    Options,
    PagedAttention,
    Pages,
    Ragged,
    quantize,
)

# Of results, which are averages of numbers around 1: both sides round them, and the weights before.
BOUNDS = {jnp.dtype(jnp.bfloat16): 0.04, jnp.dtype(jnp.float32): 1e-3}
OWN_PAGES = 3  # of a row, behind those that it shares


class Extent(NamedTuple):
    """How much is tried: rows, and pages that the long ones of them begin with, all the same
    ones."""

    rows: int
    shared: int

    @staticmethod
    def of(device: Any, page_size: int) -> "Extent":
        """More than a chip has room for at a time, so that buffers are used again and again; little
        on a CPU, where kernels run in interpreters.
        """
        if device.platform == "cpu":
            return Extent(4, 2)
        return Extent(max(8, min(48, 3072 // page_size)), -(-2048 // page_size))


def prove_attention(
    name: str, steps: Iterable[Options], heads: int, dtype: jnp.dtype, device: Any
) -> None:
    """EngineError where the implementation and the reference differ, in decode steps and others of
    these kinds.

    heads: N of a shard. dtype: of queries.
    """
    with jax.default_device(device):
        for options in steps:
            extent = Extent.of(device, options.layout.page_size)
            ours, theirs = (
                _attend(dispatch.IMPLEMENTATIONS[each], options, heads, dtype, extent)
                for each in (name, "reference")
            )
            difference = max(_apart(a, b) for a, b in zip(ours, theirs, strict=True))
            if not difference <= BOUNDS[dtype]:
                kind = {1: "a decode step", None: "a step of prompts"}.get(
                    options.max_row_tokens, "a verification"
                )
                raise EngineError(
                    f"attention {name!r} differs from the reference by {difference:.2g} in "
                    f"{kind} on "
                    f"{device.device_kind} (at most {BOUNDS[dtype]} is rounding): start with "
                    f"--attention reference, "
                    "and please report this"
                )


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; infinite where only one of them is NaN."""
    one, other = np.float32(a), np.float32(b)
    if (np.isnan(one) != np.isnan(other)).any():
        return np.inf
    return float(np.nan_to_num(np.abs(one - other)).max())


def _attend(
    kernel: PagedAttention, options: Options, heads: int, dtype: jnp.dtype, extent: Extent
) -> list[np.ndarray]:
    """What rows see that begin and end at and beside borders of pages, and numbers of their pages.

    The same for every implementation. NaN lies where nobody looks, if pages can hold it.
    """
    layout, rng = options.layout, np.random.default_rng(0)
    cached, new = _rows(options, extent)
    tables = _tables(cached, extent, layout.page_size)
    ids = np.arange(extent.shared + OWN_PAGES * extent.rows, dtype=np.int32)

    def vectors(*shape: int) -> np.ndarray:
        return rng.standard_normal((*shape, layout.head_dim), np.float32)

    def stored(*shape: int) -> np.ndarray:
        """Of which pages lose nothing: no number of 8 bits that may be rounded either way."""
        return (
            _of_eight_bits(vectors(*shape), layout.dtype, rng) if layout.scaled else vectors(*shape)
        )

    q = jnp.asarray(vectors(sum(new), heads), dtype)
    k, v = (jnp.asarray(stored(sum(new), layout.kv_heads), dtype) for _ in "kv")
    held = [stored(len(ids), layout.page_size, layout.kv_heads) for _ in "kv"]
    if not layout.scaled:
        for row, before in enumerate(cached):
            own, begin = divmod(before, layout.page_size)
            for pool in held:
                pool[tables[row, own], begin:] = np.nan
                pool[tables[row, own + 1 : own + OWN_PAGES]] = np.nan
    canonical = _canonical([jnp.asarray(pool, dtype) for pool in held], layout)
    pages = kernel.write_back(
        kernel.allocate(len(ids), layout), jnp.asarray(ids), canonical, layout
    )
    attend = jax.jit(partial(kernel.attend, options=options), donate_argnums=3)
    ragged = _ragged(cached, new, tables, layout.page_size)
    done = jax.block_until_ready(attend(q, k, None if layout.value_dim else v, pages, ragged))
    return [
        np.asarray(x)
        for x in (done.out, *_numbers(kernel.read(done.pages, jnp.asarray(ids), layout)))
    ]


def _of_eight_bits(x: np.ndarray, dtype: jnp.dtype, rng: np.random.Generator) -> np.ndarray:
    """Vectors like these that bfloat16 and pages of this dtype hold exactly, with scales that
    differ by powers of 2.
    """
    numbers = np.asarray(quantize(jnp.asarray(x), dtype)[0], np.float32)
    largest = np.ceil(np.log2(EIGHT_BITS[dtype]))
    return numbers * 2.0 ** (rng.integers(0, 3, (*x.shape[:-1], 1)) - largest)


def _numbers(canonical: Pages) -> list[jax.Array]:
    """What pages say: those of 8 bits times their scales."""
    pools = ((canonical.k, canonical.k_scale), (canonical.v, canonical.v_scale))
    return [
        x if scale is None else x.astype(jnp.float32) * scale[..., None]
        for x, scale in pools
        if x is not None
    ]


def _rows(options: Options, extent: Extent) -> tuple[list[int], list[int]]:
    """Cached and new tokens of every row; three of four are long. In a step of chunks the first
    have one token.
    """
    size, long = options.layout.page_size, extent.shared * options.layout.page_size
    before = [
        0,
        long,
        long + size - 1,
        long + 1,
        size - 1,
        long + size // 2,
        long + size // 2 + 1,
        long + 2,
    ]
    cached = [before[row % len(before)] for row in range(extent.rows)]
    if options.max_row_tokens == 1:
        return cached, [1] * extent.rows
    longest = (
        (7, size + 5)
        if options.max_row_tokens is None
        else (options.max_row_tokens, -(-options.max_row_tokens // 2))
    )
    return cached, [1 if row < extent.rows // 3 else longest[row % 2] for row in range(extent.rows)]


def _tables(cached: list[int], extent: Extent, size: int) -> np.ndarray:
    """Entries of rows: shared pages as far as nothing is written, then their own, then a page that
    exists.
    """
    tables = np.zeros((extent.rows, extent.shared + OWN_PAGES), np.int32)
    for row, before in enumerate(cached):
        whole, first = before // size, extent.shared + OWN_PAGES * row
        tables[row, : whole + OWN_PAGES] = [*range(whole), *range(first, first + OWN_PAGES)]
    return tables


def _canonical(held: list[jax.Array], layout: Layout) -> Pages:
    k, v = held
    if not layout.scaled:
        return Pages(k, None if layout.value_dim else v)
    (k, k_scale), (v, v_scale) = quantize(k, layout.dtype), quantize(v, layout.dtype)
    return Pages(k, None, k_scale) if layout.value_dim else Pages(k, v, k_scale, v_scale)


def _ragged(cached: list[int], new: list[int], tables: np.ndarray, size: int) -> Ragged:
    row = np.repeat(np.arange(len(new)), new)
    position = np.concatenate(
        [np.arange(before, before + n) for before, n in zip(cached, new, strict=True)]
    )
    fields = (
        *(tables, np.add(cached, new), np.cumsum([0, *new]), [new.count(1), len(new)]),
        *(tables[row, position // size], position % size),
    )
    return Ragged(*(jnp.asarray(field, jnp.int32) for field in fields))
