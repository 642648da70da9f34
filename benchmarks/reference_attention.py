"""Time of two ways to read pages on a CPU: a walk over blocks, and a gather of the table.

Question: how should the reference attention read pages?

    python -m benchmarks.reference_attention

Times one layer's decode attention (16 rows, 16 query and 4 kv heads of 64) for both, over page size
and live context, with a page table 2,048 tokens wide. Both are compiled in this process and timed
in turns.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.api import Layout, Options, Pages, Ragged

ROWS = 16
HEADS = 16
KV_HEADS = 4
HEAD_DIM = 64
WIDTH = 2048


def gather_whole_table(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: Pages, ragged: Ragged, options: Options
) -> tuple[jax.Array, Pages]:
    """Attend by one gather of every page in the table, then dense attention with a mask."""
    written = reference.write(pages, k, v, ragged.page, ragged.offset)
    k, v = (
        x[ragged.tables].swapaxes(1, 2).reshape(ROWS, KV_HEADS, WIDTH, HEAD_DIM)
        for x in (written.k, written.v)
    )
    grouped = q.reshape(ROWS, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    scores = (
        jnp.einsum("RKGH,RKSH->RKGS", grouped, k, preferred_element_type=jnp.float32)
        * options.scale
    )
    live = jnp.arange(WIDTH)[None] < ragged.lengths[:, None]
    weights = jax.nn.softmax(
        jnp.where(live[:, None, None], scores, reference.MASKED), axis=-1
    ).astype(v.dtype)
    out = jnp.einsum("RKGS,RKSH->RKGH", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape), written


def walk(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: Pages, ragged: Ragged, options: Options
) -> tuple[jax.Array, Pages]:
    done = reference.attend(q, k, v, pages, ragged, options)
    return done.out, done.pages


class Contestant:
    """A decode step that owns its pages: they are donated to every call, as in the engine."""

    def __init__(
        self,
        step: Callable[..., tuple[jax.Array, Pages]],
        pages: Pages,
        arguments: tuple,
        options: Options,
    ):
        self._step = jax.jit(step, static_argnames="options", donate_argnames="pages")
        self._pages = pages
        self._arguments = arguments
        self._options = options

    def milliseconds(self, repeats: int = 10) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            q, k, v, ragged = self._arguments
            out, self._pages = self._step(
                q, k, v, pages=self._pages, ragged=ragged, options=self._options
            )
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / repeats * 1e3


def compare(dtype: jnp.dtype, page_size: int, live: int) -> tuple[float, float]:
    """Return the best of five of each, taken in turns, in ms: (walk, gather)."""
    num_pages = ROWS * WIDTH // page_size
    layout = Layout(KV_HEADS, HEAD_DIM, page_size, dtype)
    tables = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(ROWS, -1)
    lengths = np.full(ROWS, live, np.int32)
    starts = np.arange(ROWS + 1, dtype=np.int32)
    last = tables[:, (live - 1) // page_size], np.full(ROWS, (live - 1) % page_size, np.int32)
    ragged = Ragged(*map(jnp.asarray, (tables, lengths, starts, np.full(2, ROWS, np.int32), *last)))
    q = jnp.ones((ROWS, HEADS, HEAD_DIM), dtype)
    new = jnp.ones((ROWS, KV_HEADS, HEAD_DIM), dtype)
    contestants = [
        Contestant(
            step,
            reference.allocate(num_pages, layout),
            (q, new, new, ragged),
            Options(layout, 0.125, max_row_tokens=1),
        )
        for step in (walk, gather_whole_table)
    ]
    for contestant in contestants:
        contestant.milliseconds(1)
    rounds = [[contestant.milliseconds() for contestant in contestants] for _ in range(5)]
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
