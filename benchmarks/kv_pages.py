"""What do pages of 8 bits cost in quality: attention's error against the length it reads, and a model's perplexity?

    python -m benchmarks.kv_pages [--out benchmarks/results/kv_pages.md]

Attention: one decode query over random keys and values, by the reference, against float64 that sees what was never
rounded. Perplexity: of the bundled model with float32 weights on documents that it was not trained on, by
prompt_logprobs, which read from pages like any step.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from checkpoints.bundled.corpus import LONG, documents
from checkpoints.bundled.tokens import encoded
from jaxserve import LLM, SamplingParams
from jaxserve.bench.output import Grid, markdown
from jaxserve.cli.flags import BUNDLED
from jaxserve.config import PAGE_DTYPES, EngineOptions
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.api import Layout, Options, Ragged

LENGTHS = (512, 2048, 8192, 32768)
SPREADS = (1, 4)  # of scores: a head that looks at much, and one that looks at little
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, TRIALS = 8, 2, 128, 128, 4
DOCUMENTS, LONG_CHATS = 60, 4

write = jax.jit(reference.write)
attend = jax.jit(reference.attend, static_argnames="options")


def attention_error(kv: str, length: int, spread: float, trials: int = TRIALS) -> float:
    """Root mean square of what is off, as a share of that of the result."""
    off, whole = 0.0, 0.0
    for seed in range(trials):
        rng = np.random.default_rng((seed, length))
        q, k, v = (rng.standard_normal((n, h, HEAD_DIM)) for n, h in ((1, HEADS), *[(length, KV_HEADS)] * 2))
        exact = dense(q[0], k, v, scale := spread * HEAD_DIM**-0.5)
        off += float(((paged(kv, q, k, v, scale) - exact) ** 2).sum())
        whole += float((exact**2).sum())
    return math.sqrt(off / whole)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """[N, H], float64."""
    grouped = q.reshape(KV_HEADS, -1, HEAD_DIM)
    scores = np.einsum("kgh,skh->kgs", grouped, k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgs,skh->kgh", weights / weights.sum(-1, keepdims=True), v).reshape(HEADS, -1)


def paged(kv: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """The same by the reference, from pages that all but the last token were written to before: [N, H] float32."""
    length = len(k)
    width = -(-length // PAGE_SIZE)
    layout = Layout(KV_HEADS, HEAD_DIM, PAGE_SIZE, jnp.dtype(PAGE_DTYPES[kv]))
    page, offset = np.divmod(np.arange(length, dtype=np.int32), PAGE_SIZE)
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    written = write(reference.allocate(width, layout), *map(jnp.asarray, (k[:-1], v[:-1], page[:-1], offset[:-1])))
    fields = (np.arange(width)[None], [length], [0, 1], [1, 1], page[-1:], offset[-1:])
    ragged = Ragged(*(jnp.asarray(field, jnp.int32) for field in fields))
    newest = map(jnp.asarray, (q, k[-1:], v[-1:]))
    return np.asarray(attend(*newest, written, ragged, options=Options(layout, scale, most=1)).out[0])


def held_out(count: int, long_chats: int) -> list[list[int]]:
    """Token ids of documents that are in no training text, of all kinds in their shares, and of long chats."""
    texts = [*documents(0, "held-out", count), *documents(0, "held-out", long_chats, LONG)]
    ids = [text.ids.tolist() for text in encoded((BUNDLED / "tokenizer.model").read_bytes(), texts)]
    return [document for document in ids if len(document) < 2048]


def perplexity(kv: str, texts: Sequence[Sequence[int]]) -> float:
    """Of every token but the first of each text."""
    options = EngineOptions(kv=kv, max_batch=1, prefix_cache=False)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(BUNDLED, dtype="float32", options=options) as llm:
        scored = llm.generate(texts, params)
    logprobs = [entry.logprob for done in scored for entry in done.prompt_logprobs or ()]
    return math.exp(-np.mean(logprobs))


def attention_table() -> Grid:
    columns = ("pages", "spread of scores", *(f"{length:,} tokens" for length in LENGTHS))
    rows = [
        (kv, str(spread), *(f"{attention_error(kv, length, spread):.2g}" for length in LENGTHS))
        for spread in SPREADS
        for kv in PAGE_DTYPES
    ]
    return Grid(columns, rows, left=2)


def perplexity_table(texts: Sequence[Sequence[int]]) -> Grid:
    found = {kv: perplexity(kv, texts) for kv in PAGE_DTYPES}
    whole = found["float32"]
    rows = [(kv, f"{value:.5f}", f"{value / whole - 1:+.3%}") for kv, value in found.items()]
    return Grid(("pages", "perplexity", "against float32"), rows)


def report() -> str:
    texts = held_out(DOCUMENTS, LONG_CHATS)
    tokens = sum(map(len, texts))
    return "\n".join(
        (
            "# Pages in other precisions\n",
            f"`python -m benchmarks.kv_pages`, on a CPU, jax {jax.__version__}.\n",
            "## Error of attention against float64, by the length it reads\n",
            f"Root mean square, as a share of the result's. {TRIALS} decode queries of {HEADS} heads over {KV_HEADS}",
            f"kv heads of {HEAD_DIM}; keys, values and queries normal.\n",
            markdown(attention_table()),
            "## Perplexity of the bundled model\n",
            f"tiny-chat with float32 weights, {len(texts)} held-out documents, {tokens:,} tokens.\n",
            markdown(perplexity_table(texts)),
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
