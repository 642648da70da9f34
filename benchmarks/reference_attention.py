"""How should the reference attention read pages on a CPU: walk over blocks, or gather the whole table?

    python -m benchmarks.reference_attention

Times one layer's decode attention (16 rows, 16 query and 4 kv heads of 64) for both, over page size and live context,
with a page table 2,048 tokens wide. Both are compiled in this process and timed in turns.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.reference import Pages

ROWS, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 16, 16, 4, 64, 2048


def gather_whole_table(q: jax.Array, pages: Pages, tables: jax.Array, lengths: jax.Array, *, scale: float) -> jax.Array:
    """The obvious way: one gather of every page in the table, then dense attention with a mask."""
    k, v = (x[tables].swapaxes(1, 2).reshape(ROWS, KV_HEADS, WIDTH, HEAD_DIM) for x in pages)
    grouped = q.reshape(ROWS, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    scores = jnp.einsum("RKGH,RKSH->RKGS", grouped, k, preferred_element_type=jnp.float32) * scale
    live = jnp.arange(WIDTH)[None] < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(live[:, None, None], scores, reference.MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("RKGS,RKSH->RKGH", weights, v, preferred_element_type=jnp.float32).reshape(q.shape)


def milliseconds(run: Callable[[], jax.Array], repeats: int = 10) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats * 1e3


def compare(dtype: jnp.dtype, page_size: int, live: int) -> tuple[float, float]:
    """Best of five of each, taken in turns, in ms: (walk, gather)."""
    num_pages = ROWS * WIDTH // page_size
    pages = reference.allocate(num_pages, KV_HEADS, page_size, HEAD_DIM, dtype)
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    tables, lengths = jnp.asarray(order.reshape(ROWS, -1)), jnp.full((ROWS,), live, jnp.int32)
    q = jnp.ones((ROWS, HEADS, HEAD_DIM), dtype)
    steps = [jax.jit(f, static_argnames="scale") for f in (reference.decode, gather_whole_table)]
    calls = [lambda step=step: step(q, pages, tables, lengths, scale=0.125) for step in steps]
    for call in calls:
        jax.block_until_ready(call())
    rounds = [[milliseconds(call) for call in calls] for _ in range(5)]
    walk, gather = (min(column) for column in zip(*rounds, strict=True))
    return walk, gather


def main() -> None:
    table = Table("dtype", "page", "live context", "walk ms", "gather ms", "ratio")
    for dtype in (jnp.float32, jnp.bfloat16):
        for page_size in (16, 64):
            for live in (200, 2000):
                walk, gather = compare(jnp.dtype(dtype), page_size, live)
                row = f"{walk:.2f}", f"{gather:.2f}", f"{gather / walk:.1f}x"
                table.add_row(jnp.dtype(dtype).name, str(page_size), str(live), *row)
    Console().print(table)


if __name__ == "__main__":
    main()
