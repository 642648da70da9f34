"""Cost in quality of numbers with fewer bits: perplexity and tokens that change.

Perplexity is that of held-out text.

    python -m benchmarks.quality --out benchmarks/results/quality.json

Every form of weights with every kind of pages, on the bundled model and, where JAXSERVE_TEST_DATA
has it, on one that others trained. What is not said to be of fewer bits is float32, so that what
changes is their rounding alone. Results are written as they come. The exit status is 1 when a bound
is broken.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.quality_texts import LONGEST, SHORTEST, Subject, babyllama, bundled
from jaxserve.bench.environment import environment
from jaxserve.bench.output import Grid, markdown
from jaxserve.config import EIGHT_BITS, EngineOptions
from jaxserve.errors import ModelError
from jaxserve.llm import LLM
from jaxserve.models.quant import SCHEMES
from jaxserve.sampling_params import SamplingParams

PLAIN = "auto"
ANSWER = 16  # tokens
# Of the change of perplexity, by form of weights and kind of pages.
BOUNDS = {
    ("int8", PLAIN): 0.01,
    ("fp8", PLAIN): 0.01,
    ("int4-g32", PLAIN): 0.08,
    ("w8a8-int8", PLAIN): 0.01,
    ("w8a8-fp8", PLAIN): 0.01,
    (PLAIN, "int8"): 0.005,
    (PLAIN, "fp8"): 0.005,
}
GRID: list[tuple[str, str]] = list(product((PLAIN, *SCHEMES), (PLAIN, *EIGHT_BITS)))
PAIRS = {
    ("int8", "int8"),
    ("fp8", "fp8"),
    ("int4-g32", "int8"),
    ("w8a8-int8", "int8"),
    ("w8a8-fp8", "fp8"),
}
EXPLAINED = """\
*Perplexity*: of the tokens that count. *Change*: against float32 throughout. *First token*: at how
many of the tokens that count the most probable one is that of float32. *Greedy tokens*: each of
{prompts:,} prompts, {shortest} to {longest} tokens of held-out text, has a greedy answer of up to
{answer} tokens with float32; the share of these tokens that would be chosen here too, given the
same tokens before. *Whole answers*: the share of answers of which this is so from beginning to end,
which greedy decoding therefore gives here as well. Both were measured of every format alone and of
a few pairs. *Bound*: of the change, for `tiny-chat`, asserted by a test. Forms that are not in a
table have groups that do not divide the model's sums.
"""


class Scores(NamedTuple):
    """Scores of tokens, in their order."""

    logprobs: np.ndarray
    best: np.ndarray  # the most probable token in its place

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprobs.mean())


@dataclass(frozen=True)
class Quality:
    """Shares, and change against float32; greedy, answers: None where they were not measured."""

    model: str
    weights: str
    kv: str
    tokens: int
    perplexity: float
    change: float
    first: float
    greedy: float | None = None
    answers: float | None = None

    @property
    def bound(self) -> float | None:
        return BOUNDS.get((self.weights, self.kv))

    @property
    def broken(self) -> bool:
        return self.bound is not None and self.change > self.bound


class Measurement:
    """Measurement of one model; float32, which others are compared with, comes first."""

    def __init__(self, subject: Subject):
        self.subject = subject
        with self._open(PLAIN, PLAIN) as llm:
            self._plain = self._scored(llm)
            greedy = SamplingParams(max_tokens=ANSWER, temperature=0)
            self._answers = [done.token_ids for done in llm.generate(subject.prompts, greedy)]

    def of(self, weights: str, kv: str, greedy: bool = True) -> Quality:
        """Return the quality of a format.

        greedy: whether to count greedy tokens too. ModelError where this model cannot be quantized
        so.
        """
        with self._open(weights, kv) as llm:
            found = self._scored(llm)
            same = self._same(llm) if greedy else []
        return self._quality(weights, kv, found, same)

    @property
    def plain(self) -> Quality:
        return self._quality(PLAIN, PLAIN, self._plain, [])

    def _quality(self, weights: str, kv: str, found: Scores, same: Sequence[np.ndarray]) -> Quality:
        """Return the figures; same: of each answer, or of none if answers were not asked for."""
        return Quality(
            self.subject.name,
            weights,
            kv,
            tokens=len(found.logprobs),
            perplexity=found.perplexity,
            change=found.perplexity / self._plain.perplexity - 1,
            first=float((found.best == self._plain.best).mean()),
            greedy=float(np.concatenate(same).mean()) if same else None,
            answers=float(np.mean([each.all() for each in same])) if same else None,
        )

    def _open(self, weights: str, kv: str) -> LLM:
        """Open the model with as few compiled steps as possible.

        Most of the time is spent compiling them.
        """
        options = EngineOptions(
            max_batch=16,
            step_tokens=512,
            kv=kv,
            max_context=self.subject.longest,
            deterministic=True,
            prefix_cache=False,
        )
        return LLM(self.subject.folder, dtype="float32", weights=weights, options=options)

    def _scored(self, llm: LLM) -> Scores:
        found = scores(llm, [text.ids.tolist() for text in self.subject.texts])
        # The first token has no log-probability: entry i is of token i + 1.
        counted = np.concatenate([text.answer[1:] for text in self.subject.texts])
        logprobs, best = (np.concatenate(each)[counted] for each in zip(*found, strict=True))
        return Scores(logprobs, best)

    def _same(self, llm: LLM) -> list[np.ndarray]:
        """Return which tokens of each answer are most probable here."""
        pairs = list(zip(self.subject.prompts, self._answers, strict=True))
        found = scores(llm, [[*prompt, *answer] for prompt, answer in pairs])
        return [
            each.best[-len(answer) :] == np.array(answer)
            for each, (_, answer) in zip(found, pairs, strict=True)
        ]


def scores(llm: LLM, texts: Sequence[Sequence[int]]) -> list[Scores]:
    """Return the scores of every token but the first of each text.

    Keys and values are read from pages, as in any step.
    """
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    entries = [done.prompt_logprobs or () for done in llm.generate(texts, params)]
    return [
        Scores(
            np.array([entry.logprob for entry in text]),
            np.array([entry.top[0][0] for entry in text]),
        )
        for text in entries
    ]


def measured(subjects: Sequence[Subject], console: Console) -> Iterator[Quality]:
    """Yield the quality of all formats, single ones first.

    Formats that a model's sizes do not allow are left out, and the reason is printed.
    """
    measurements = [Measurement(subject) for subject in subjects]
    yield from (measurement.plain for measurement in measurements)
    order = sorted(GRID[1:], key=lambda pair: (PLAIN not in pair, pair not in PAIRS))
    for (weights, kv), measurement in product(order, measurements):
        try:
            yield measurement.of(
                weights, kv, greedy=PLAIN in (weights, kv) or (weights, kv) in PAIRS
            )
        except ModelError as error:
            console.print(f"{measurement.subject.name}: {error}", soft_wrap=True, markup=False)


def table(results: Sequence[Quality]) -> Grid:
    columns = (
        "--weights",
        "--kv",
        "perplexity",
        "change",
        "first token",
        "greedy tokens",
        "whole answers",
        "bound",
    )
    ordered = sorted(results, key=lambda result: GRID.index((result.weights, result.kv)))
    return Grid(columns, [tuple(cells(result)) for result in ordered], left=2)


def cells(result: Quality) -> Iterator[str]:
    yield from (
        result.weights,
        result.kv,
        f"{result.perplexity:.4f}",
        f"{result.change:+.2%}",
        f"{result.first:.2%}",
    )
    yield from (
        "" if share is None else f"{share:.2%}" for share in (result.greedy, result.answers)
    )
    yield "" if result.bound is None else f"{result.bound:.1%}"


def report(about: dict[str, Any], subjects: Sequence[Subject], results: Sequence[Quality]) -> str:
    versions = f"jaxserve {about['jaxserve']}, jax {about['jax']}, {about['date']}"
    parts = ["# Quality by format\n", f"`{about['command']}`, on a CPU, {versions}.\n"]
    prompts = max(len(subject.prompts) for subject in subjects)
    parts.append(
        EXPLAINED.format(prompts=prompts, shortest=SHORTEST, longest=LONGEST, answer=ANSWER)
    )
    for subject in subjects:
        mine = [result for result in results if result.model == subject.name]
        counted = sum(int(text.answer[1:].sum()) for text in subject.texts)
        parts.append(
            f"## {subject.name}\n\n{len(subject.texts)} {subject.source}: {counted:,} tokens "
            f"count.\n"
        )
        parts.append(markdown(table(mine)))
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--documents", type=int, default=60, metavar="N", help="held-out documents (60)"
    )
    parser.add_argument(
        "--prompts", type=int, default=1000, metavar="N", help="prompts of greedy answers (1000)"
    )
    parser.add_argument("--out", type=Path, metavar="F", help="JSON; a table beside it as .md")
    args = parser.parse_args()
    console = Console(stderr=True)
    about = environment("python -m benchmarks.quality " + " ".join(sys.argv[1:]))
    found = [bundled(args.documents, args.prompts), babyllama(args.documents, args.prompts)]
    subjects = [subject for subject in found if subject]
    if len(subjects) < len(found):
        console.print("babyllama is left out: JAXSERVE_TEST_DATA names no folder that has it")
    results = list[Quality]()
    for result in measured(subjects, console):
        results.append(result)
        console.print(" ".join((result.model, *cells(result))), soft_wrap=True, markup=False)
        if args.out:
            told = {"environment": about, "benchmark": "quality", "documents": args.documents}
            told |= {"prompts": args.prompts, "results": [asdict(each) for each in results]}
            args.out.write_text(json.dumps(told, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(report(about, subjects, results))
    return int(any(result.broken for result in results))


if __name__ == "__main__":
    sys.exit(main())
