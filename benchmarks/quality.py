"""What quantized weights cost: perplexity of held-out documents, and how often the most probable token changes.

    python -m benchmarks.quality --out benchmarks/results/quality.json

Documents of the bundled model's own held-out split; of a conversation its answers count, as in training. Everything
but the weights is float32, so that what changes is their rounding. The exit status is 1 when a bound is broken.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from checkpoints.bundled.corpus import documents
from checkpoints.bundled.tokens import Encoded, encoded
from jaxserve.bench.environment import environment
from jaxserve.cli.output import Bar
from jaxserve.config import EngineOptions
from jaxserve.errors import ModelError
from jaxserve.llm import LLM
from jaxserve.models.quant import FORMS
from jaxserve.request import SamplingParams

BUNDLED = Path(__file__).parents[1] / "checkpoints" / "bundled" / "tiny-chat"
BOUNDS = {"int8": 0.01, "fp8": 0.01, "int4-g32": 0.08}  # of the change of perplexity
PLAIN = "auto"


class Scores(NamedTuple):
    """Of the tokens that count, in their order."""

    logprobs: np.ndarray
    best: np.ndarray  # the most probable token in its place


@dataclass(frozen=True)
class Quality:
    """change: of perplexity against weights that are not quantized. agreement: share of most probable tokens."""

    weights: str
    tokens: int
    perplexity: float
    change: float
    agreement: float


def score(weights: str, texts: Sequence[Encoded]) -> Scores:
    """ModelError where the model cannot be quantized so."""
    options = EngineOptions(max_batch=8, step_tokens=512)
    with (
        Bar(Console(stderr=True), weights) as bar,
        LLM(BUNDLED, dtype="float32", weights=weights, options=options, on_compile=bar.update) as llm,
    ):
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        done = llm.generate([text.ids.tolist() for text in texts], params)
    pairs = list[tuple[float, int]]()
    for text, completion in zip(texts, done, strict=True):
        assert completion.prompt_logprobs is not None
        # The first token has no log-probability: entry i is of token i + 1.
        counted = zip(completion.prompt_logprobs, text.answer[1:], strict=True)
        pairs += [(entry.logprob, entry.top[0][0]) for entry, counts in counted if counts]
    logprobs, best = zip(*pairs, strict=True)
    return Scores(np.array(logprobs), np.array(best))


def quality(weights: str, found: Scores, plain: Scores) -> Quality:
    perplexity, exact = (math.exp(-scores.logprobs.mean()) for scores in (found, plain))
    agreement = float((found.best == plain.best).mean())
    return Quality(weights, len(found.logprobs), perplexity, perplexity / exact - 1, agreement)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=40, metavar="N", help="held-out documents (40)")
    parser.add_argument("--out", type=Path, metavar="F", help="JSON; a table beside it as .md")
    args = parser.parse_args()
    about = environment("python -m benchmarks.quality " + " ".join(sys.argv[1:]))
    tokenizer = (BUNDLED / "tokenizer.model").read_bytes()
    texts = encoded(tokenizer, documents(0, "held-out", args.documents))
    plain, console = score(PLAIN, texts), Console(stderr=True)
    results = [quality(PLAIN, plain, plain)]
    for weights in FORMS:
        try:
            results.append(quality(weights, score(weights, texts), plain))
            console.print(str(results[-1]), soft_wrap=True, markup=False)
        except ModelError as error:
            console.print(str(error), soft_wrap=True, markup=False)
    head = ("--weights", "perplexity", "change", "most probable token agrees", "bound of the change")
    rows = [cells(result) for result in results]
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if args.out:
        told = {"environment": about, "benchmark": "quality", "model": BUNDLED.name, "documents": args.documents}
        args.out.write_text(json.dumps(told | {"results": [asdict(r) for r in results]}, indent=1) + "\n")
        lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
        args.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return int(any(result.change > BOUNDS.get(result.weights, math.inf) for result in results))


def cells(result: Quality) -> tuple[str, ...]:
    bound = f"{BOUNDS[result.weights]:.0%}" if result.weights in BOUNDS else ""
    return (result.weights, f"{result.perplexity:.4f}", f"{result.change:+.2%}", f"{result.agreement:.2%}", bound)


if __name__ == "__main__":
    sys.exit(main())
