"""Before anything is answered: this engine's attention beside the reference, on the device that will run it.

Kernels are proved in interpreters and by compilers. What a device, a driver or another version makes of them shows
here, in seconds, and not in somebody's text.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import EngineError
from pallas_kernels import dispatch
from pallas_kernels.paged_attention.api import Layout, Options, PagedAttention, Pages, Ragged, quantize

WIDTH = 4  # pages of a row
# Of results, which are averages of numbers around 1: both sides round them, and the weights before.
BOUNDS = {jnp.dtype(jnp.bfloat16): 0.04, jnp.dtype(jnp.float32): 1e-3}


def prove_attention(name: str, steps: Iterable[Options], heads: int, dtype: jnp.dtype, device: Any) -> None:
    """EngineError where the implementation and the reference differ, in decode steps and others of these kinds.

    heads: N of a shard. dtype: of queries.
    """
    with jax.default_device(device):
        for options in steps:
            ours, theirs = (
                _attend(dispatch.IMPLEMENTATIONS[each], options, heads, dtype) for each in (name, "reference")
            )
            apart = [np.abs(np.float32(a) - np.float32(b)).max() for a, b in zip(ours, theirs, strict=True)]
            difference = float(np.max(apart))  # NaN if there is any
            if not difference <= BOUNDS[dtype]:
                kind = "a decode step" if options.most == 1 else "a step of prompts"
                raise EngineError(
                    f"attention {name!r} differs from the reference by {difference:.2g} in {kind} on "
                    f"{device.device_kind} (at most {BOUNDS[dtype]} is rounding): start with --attention reference, "
                    "and please report this"
                )


def _attend(kernel: PagedAttention, options: Options, heads: int, dtype: jnp.dtype) -> list[np.ndarray]:
    """What rows see that end at and beside borders of pages, and numbers of their pages. The same for everybody."""
    layout, size, rng = options.layout, options.layout.page_size, np.random.default_rng(0)
    new = [1, 1, 1, 1] if options.most == 1 else [1, 1, 7, size + 5]
    lengths = [1, size, size + 1, 4 * size - 1] if options.most == 1 else [size, 3 * size + 1, size + 3, 4 * size]

    def vectors(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(*shape, layout.head_dim)), dtype)

    ids = np.arange(len(new) * WIDTH, dtype=np.int32)
    q, k, v = (vectors(sum(new), count) for count in (heads, layout.kv_heads, layout.kv_heads))
    held = vectors(len(ids), size, layout.kv_heads), vectors(len(ids), size, layout.kv_heads)
    ragged = _ragged(new, lengths, rng.permutation(ids).reshape(-1, WIDTH), size)
    pages = kernel.write_back(kernel.allocate(len(ids), layout), jnp.asarray(ids), _canonical(held, layout), layout)
    attend = jax.jit(partial(kernel.attend, options=options), donate_argnums=3)
    done = jax.block_until_ready(attend(q, k, None if layout.value_dim else v, pages, ragged))
    found = [done.out]
    if not layout.scaled:  # a number of 8 bits may be rounded either way
        found += jax.tree.leaves(kernel.read(done.pages, jnp.asarray(ids), layout))
    return [np.asarray(x) for x in found]


def _canonical(held: tuple[jax.Array, jax.Array], layout: Layout) -> Pages:
    k, v = held
    if not layout.scaled:
        return Pages(k, None if layout.value_dim else v)
    (k, k_scale), (v, v_scale) = quantize(k, layout.dtype), quantize(v, layout.dtype)
    return Pages(k, None, k_scale) if layout.value_dim else Pages(k, v, k_scale, v_scale)


def _ragged(new: list[int], lengths: list[int], tables: np.ndarray, size: int) -> Ragged:
    row = np.repeat(np.arange(len(new)), new)
    position = np.concatenate([np.arange(end - count, end) for count, end in zip(new, lengths, strict=True)])
    fields = (
        *(tables, lengths, np.cumsum([0, *new]), [new.count(1), len(new)]),
        *(tables[row, position // size], position % size),
    )
    return Ragged(*(jnp.asarray(field, jnp.int32) for field in fields))
