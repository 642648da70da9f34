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
from pallas_kernels.paged_attention.api import Layout, Options, Pages, Ragged

ROWS, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 16, 16, 4, 64, 2048


def gather_whole_table(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: Pages, ragged: Ragged, options: Options
) -> jax.Array:
    """The obvious way: one gather of every page in the table, then dense attention with a mask."""
    written = reference.write(pages, k, v, ragged.page, ragged.offset)
    k, v = (x[ragged.tables].swapaxes(1, 2).reshape(ROWS, KV_HEADS, WIDTH, HEAD_DIM) for x in (written.k, written.v))
    grouped = q.reshape(ROWS, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    scores = jnp.einsum("RKGH,RKSH->RKGS", grouped, k, preferred_element_type=jnp.float32) * options.scale
    live = jnp.arange(WIDTH)[None] < ragged.lengths[:, None]
    weights = jax.nn.softmax(jnp.where(live[:, None, None], scores, reference.MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("RKGS,RKSH->RKGH", weights, v, preferred_element_type=jnp.float32).reshape(q.shape)


def walk(q: jax.Array, k: jax.Array, v: jax.Array, pages: Pages, ragged: Ragged, options: Options) -> jax.Array:
    return reference.attend(q, k, v, pages, ragged, options).out


def milliseconds(run: Callable[[], jax.Array], repeats: int = 10) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats * 1e3


def compare(dtype: jnp.dtype, page_size: int, live: int) -> tuple[float, float]:
    """Best of five of each, taken in turns, in ms: (walk, gather)."""
    num_pages = ROWS * WIDTH // page_size
    layout = Layout(KV_HEADS, HEAD_DIM, page_size, dtype)
    pages = reference.allocate(num_pages, layout)
    tables = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(ROWS, -1)
    lengths, starts = np.full(ROWS, live, np.int32), np.arange(ROWS + 1, dtype=np.int32)
    last = tables[:, (live - 1) // page_size], np.full(ROWS, (live - 1) % page_size, np.int32)
    ragged = Ragged(*jax.tree.map(jnp.asarray, (tables, lengths, starts, np.full(2, ROWS, np.int32), *last)))
    q, new = jnp.ones((ROWS, HEADS, HEAD_DIM), dtype), jnp.ones((ROWS, KV_HEADS, HEAD_DIM), dtype)
    steps = [jax.jit(f, static_argnames="options") for f in (walk, gather_whole_table)]
    calls = [lambda step=step: step(q, new, new, pages, ragged, Options(layout, 0.125, decode=True)) for step in steps]
    for call in calls:
        jax.block_until_ready(call())
    rounds = [[milliseconds(call) for call in calls] for _ in range(5)]
    walked, gathered = (min(column) for column in zip(*rounds, strict=True))
    return walked, gathered


def main() -> None:
    table = Table("dtype", "page", "live context", "walk ms", "gather ms", "ratio")
    for dtype in (jnp.float32, jnp.bfloat16):
        for page_size in (16, 64):
            for live in (200, 2000):
                walked, gathered = compare(jnp.dtype(dtype), page_size, live)
                row = f"{walked:.2f}", f"{gathered:.2f}", f"{gathered / walked:.1f}x"
                table.add_row(jnp.dtype(dtype).name, str(page_size), str(live), *row)
    Console().print(table)


if __name__ == "__main__":
    main()
