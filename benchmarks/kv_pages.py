"""Error of attention over pages of fewer bits, by the length it reads.

    python -m benchmarks.kv_pages [--out benchmarks/results/kv_pages.md]

One decode query over random keys and values, by the reference, against float64 that sees what was
never rounded. What that does to a model is for benchmarks.quality.
"""

import argparse
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxserve.bench.output import Grid, markdown
from jaxserve.config import PAGE_DTYPES
from jaxserve.pallas_kernels.paged_attention import reference
from jaxserve.pallas_kernels.paged_attention.api import Layout, Options, Ragged

LENGTHS = (512, 2048, 8192, 32768)
# degrees of: Student's t with so few has its largest numbers far out, as outlying channels are
FREEDOM = 3
# Of scores: a head that looks at much, and one that looks at little.
CASES = (("normal", 1), ("normal", 4), ("heavy-tailed", 1))
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 128
PAGE_SIZE = 128
TRIALS = 4

write = jax.jit(reference.write)
attend = jax.jit(reference.attend, static_argnames="options")


def attention_error(
    kv: str, length: int, spread: float, numbers: str = "normal", trials: int = TRIALS
) -> float:
    """Return the root mean square of the error, as a share of that of the result."""
    off = 0.0
    whole = 0.0
    for seed in range(trials):
        rng = np.random.default_rng((seed, length))
        q, k, v = (
            drawn(rng, numbers, (n, h, HEAD_DIM))
            for n, h in ((1, HEADS), *[(length, KV_HEADS)] * 2)
        )
        exact = dense(q[0], k, v, scale := spread * HEAD_DIM**-0.5)
        off += float(((paged(kv, q, k, v, scale) - exact) ** 2).sum())
        whole += float((exact**2).sum())
    return math.sqrt(off / whole)


def drawn(rng: np.random.Generator, numbers: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random numbers of variance 1."""
    if numbers == "normal":
        return rng.standard_normal(shape)
    return rng.standard_t(FREEDOM, shape) / math.sqrt(FREEDOM / (FREEDOM - 2))


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Return dense attention [N, H] in float64."""
    grouped = q.reshape(KV_HEADS, -1, HEAD_DIM)
    scores = np.einsum("kgh,skh->kgs", grouped, k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgs,skh->kgh", weights / weights.sum(-1, keepdims=True), v).reshape(HEADS, -1)


def paged(kv: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Return attention by the reference, [N, H] float32.

    All tokens but the last were written to pages before.
    """
    length = len(k)
    width = -(-length // PAGE_SIZE)
    layout = Layout(KV_HEADS, HEAD_DIM, PAGE_SIZE, jnp.dtype(PAGE_DTYPES[kv]))
    page, offset = np.divmod(np.arange(length, dtype=np.int32), PAGE_SIZE)
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    written = write(
        reference.allocate(width, layout),
        *map(jnp.asarray, (k[:-1], v[:-1], page[:-1], offset[:-1])),
    )
    fields = (np.arange(width)[None], [length], [0, 1], [1, 1], page[-1:], offset[-1:])
    ragged = Ragged(*(jnp.asarray(field, jnp.int32) for field in fields))
    newest = map(jnp.asarray, (q, k[-1:], v[-1:]))
    return np.asarray(
        attend(*newest, written, ragged, options=Options(layout, scale, max_row_tokens=1)).out[0]
    )


def attention_table() -> Grid:
    columns = (
        "pages",
        "numbers",
        "spread of scores",
        *(f"{length:,} tokens" for length in LENGTHS),
    )
    rows = [
        (
            kv,
            numbers,
            str(spread),
            *(f"{attention_error(kv, length, spread, numbers):.2g}" for length in LENGTHS),
        )
        for numbers, spread in CASES
        for kv in PAGE_DTYPES
    ]
    return Grid(columns, rows, left=3)


def report() -> str:
    return "\n".join(
        (
            "# Attention over pages in other precisions\n",
            f"`python -m benchmarks.kv_pages`, on a CPU, jax {jax.__version__}.\n",
            "Error against float64, by the length that is read: root mean square, as a share of "
            "the result's. "
            f"{TRIALS} decode queries",
            f"of {HEADS} heads over {KV_HEADS} kv heads of {HEAD_DIM}. Keys, values and queries "
            f"are normal, or",
            f"heavy-tailed: of Student's t with {FREEDOM} degrees of freedom.\n",
            markdown(attention_table()),
        )
    )


def main() -> None:
    what = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_pages", description=what)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = report()
    Console(highlight=False).print(text, markup=False, soft_wrap=True, end="")
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
