"""Every shape a step can have, for warm-up, ahead-of-time compilation and serving alike.

Besides, the numbers of pages that are read or written at once for other engines.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, log

from jaxserve.config import EngineConfig
from jaxserve.engine.plan import StepKind
from jaxserve.errors import EngineError

MIN_TOKENS = 16
HALVES = 64  # tokens from which on there is a bucket halfway between two doublings
SEGMENT_TOKENS = 512  # tokens whose pages travel at once, unless one page has more
# Segments on the devices at a time: read and not on the host yet, or uploaded and not written yet.
SEGMENTS_ON_DEVICE = 4


@dataclass(frozen=True, order=True)
class Bucket:
    """Shape of a step; the smallest bucket that holds a step runs it, with padding."""

    kind: StepKind
    rows: int  # chunks per lane
    tokens: int  # query tokens per lane, packed (one per row in decode steps)
    steps: int = 1  # decode steps that are launched as one
    drafts: int = 0  # the most drafted tokens of a row

    def fresh_pages(self, page_size: int) -> int:
        """Return the most pages that a step of this shape can begin, per page group."""
        return self.tokens * self.steps // page_size + self.rows

    @property
    def max_row_tokens(self) -> int | None:
        """Return the most tokens that one row can have; None if a row may have all of them."""
        return 1 + self.drafts if self.kind in ("decode", "verify") else None

    @property
    def max_row_results(self) -> int:
        """Return the most tokens that one row can get."""
        return max(self.steps, 1 + self.drafts)

    def holds(self, other: "Bucket") -> bool:
        """Return whether this shape runs every step that the other one runs."""
        return (
            self.kind == other.kind
            and self.steps == other.steps
            and self.rows >= other.rows
            and self.tokens >= other.tokens
            and self.drafts >= other.drafts
        )

    def __str__(self) -> str:
        if self.kind == "decode":
            return f"decode[{self.rows}]" + (f" x {self.steps}" if self.steps > 1 else "")
        if self.kind == "verify":
            return f"verify[{self.rows} x {self.drafts}]"
        return f"{self.kind}[{self.rows}x{self.tokens}]"


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of an engine."""

    buckets: tuple[Bucket, ...]

    @staticmethod
    def of(config: EngineConfig) -> "BucketPlan":
        """Return the buckets that hold every step an engine of this configuration can plan.

        Decode steps, one by one and several as one, come over doubling rows, and prefill steps over
        growing tokens. With speculation there are steps that verify drafted tokens, over the same
        rows; with a draft model, steps of it alone, over growing tokens. A deterministic engine has
        one bucket of each kind. A model that embeds has embed steps and no others.
        """
        rows = _doubling(config.min_rows, max(config.max_batch, config.min_rows))
        tokens = _growing(MIN_TOKENS, max(config.step_tokens, MIN_TOKENS))
        if config.deterministic:
            rows = rows[-1:]
            tokens = tokens[-1:]
        max_rows = rows[-1]
        if config.embeds:
            return BucketPlan(tuple(Bucket("embed", max_rows, t) for t in tokens))
        decode = [
            Bucket("decode", r, r, steps)
            for steps in sorted({1, config.decode_steps})
            for r in rows
        ]
        verify = [
            Bucket("verify", r, min(r * (1 + k), max(config.step_tokens, r)), drafts=k)
            for k in draft_counts(config.draft_tokens)
            for r in rows
        ]
        prefill = [Bucket("prefill", max_rows, t) for t in tokens]
        score = [Bucket("score", max_rows, tokens[-1])]
        draft = []
        if config.drafts_by_model:
            draft = [Bucket("draft", max_rows, t) for t in _growing_fast(MIN_TOKENS, tokens[-1])]
        return BucketPlan(tuple(decode + verify + prefill + score + draft))

    def reachable(
        self,
        prompts: Sequence[tuple[int, int]],
        *,
        config: EngineConfig,
        score: bool,
        forced: bool = False,
    ) -> tuple[Bucket, ...]:
        """Return the buckets that these sequences can lead to, whatever order they run in.

        Args:
            prompts: Prompt tokens and max_tokens of each sequence.
            score: Whether prompt log-probabilities are wanted.
            forced: Whether grammars may force tokens of an output, which are computed like those
                of a prompt.
        """
        # A sequence that runs alone is never preempted: only its prompt is ever prefilled.
        alone = len(prompts) == 1 and not forced
        prefilled = sum(prompt if alone else prompt + output for prompt, output in prompts)
        shortest = 1 if forced else min(prompt for prompt, _ in prompts)
        chunks = min(shortest, config.step_tokens), min(prefilled, config.step_tokens)
        if config.embeds:
            return self._span("embed", *chunks)
        rows = min(len(prompts), config.max_batch)
        # The step that ends a prompt gives the first token of its output: an output of k tokens
        # never has k decodes.
        longest = max(output for _, output in prompts)
        decode = tuple(b for b in self._span("decode", 1, rows) if b.steps < max(longest, 2))
        widest = max(b.rows for b in decode)
        verify = tuple(b for b in self.buckets if b.kind == "verify" and b.rows <= widest)
        found = decode + verify + self._span("prefill", *chunks)
        if config.drafts_by_model:
            lacking = min(sum(map(sum, prompts)), config.step_tokens)
            found += self._span("draft", 1, lacking)
        if score:
            found += self._span("score", 1, 1)
        return found

    def _span(self, kind: StepKind, low: int, high: int) -> tuple[Bucket, ...]:
        """Return the buckets from the first for `low` tokens to the first for `high` tokens."""
        sizes = sorted(b.tokens for b in self.buckets if b.kind == kind)
        first = next(size for size in sizes if size >= low)
        last = next(size for size in sizes if size >= high)
        return tuple(b for b in self.buckets if b.kind == kind and first <= b.tokens <= last)


def required(wanted: Iterable[Bucket], compiled: Iterable[Bucket] = ()) -> tuple[Bucket, ...]:
    """Return the fewest buckets without which a step of the wanted ones could not run.

    They are the largest of each kind, unless a compiled one holds them. Decodes that are launched
    as one are never among them: the scheduler can launch them one by one.

    Args:
        wanted: Buckets whose steps may be planned.
        compiled: Buckets that are there already.
    """
    singles = [bucket for bucket in wanted if bucket.steps == 1]
    largest = {bucket.kind: bucket for bucket in sorted(singles, key=_size)}
    there = tuple(compiled)
    return tuple(
        bucket for bucket in largest.values() if not any(other.holds(bucket) for other in there)
    )


def by_gain(pending: Iterable[Bucket], compiled: Iterable[Bucket]) -> list[Bucket]:
    """Return buckets in the order in which compiling them one after the other gains most.

    Steps that no compiled bucket holds come first. The gain of another bucket is the padding that
    it takes from the steps of all pending buckets that it holds, where every bucket is equally
    likely to be needed: the sum of the logarithms of the tokens computed before and after.
    """
    left = sorted(sorted(pending), key=_size, reverse=True)
    there = list(compiled)
    ordered: list[Bucket] = []
    while left:
        best = max(left, key=partial(_gain, left, there))
        left.remove(best)
        there.append(best)
        ordered.append(best)
    return ordered


def _gain(left: Sequence[Bucket], there: Sequence[Bucket], bucket: Bucket) -> float:
    """Return what compiling a bucket next gains for the buckets that are left."""
    gain = 0.0
    for other in left:
        if bucket.holds(other):
            serving = [b.tokens for b in there if b.holds(other)]
            if not serving:
                return inf
            gain += max(log(min(serving) / bucket.tokens), 0.0)
    return gain


def _size(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.rows, bucket.tokens, bucket.drafts


def choose(
    available: Iterable[Bucket],
    kind: StepKind,
    rows: int,
    tokens: int,
    steps: int = 1,
    drafts: int = 0,
) -> Bucket:
    """Return the smallest bucket that holds the step, which has `tokens` in all `steps` together.

    Raises EngineError if none does.
    """
    fitting = [
        b
        for b in available
        if b.kind == kind
        and b.steps == steps
        and b.rows >= rows
        and b.tokens * steps >= tokens
        and b.drafts >= drafts
    ]
    if not fitting:
        what = f"{kind} step" if steps == 1 else f"{kind} of {steps} steps"
        raise EngineError(f"no compiled {what} holds {rows} rows and {tokens} tokens")
    return min(fitting)


def page_counts(config: EngineConfig) -> tuple[int, ...]:
    """Return the numbers of pages that are read or written at once for other engines.

    They fall from the most by quarters: the most, a quarter of that, ..., 1.
    """
    counts = [min(max(SEGMENT_TOKENS // config.page_size, 1), config.pages_per_row)]
    while counts[-1] > 1:
        counts.append(max(counts[-1] // 4, 1))
    return tuple(counts)


def split_pages(pages: int, config: EngineConfig) -> Iterator[int]:
    """Yield numbers of page_counts that add up to `pages`, the largest first, without padding."""
    for count in page_counts(config):
        yield from [count] * (pages // count)
        pages %= count


def draft_counts(limit: int) -> tuple[int, ...]:
    """Return the numbers of drafted tokens per row that steps are compiled for, up to `limit`.

    They are 1, 3, 7, ... and `limit`: with the newest token, chunks are powers of two.
    """
    return tuple(size - 1 for size in _doubling(2, 1 + limit)) if limit else ()


def _growing(first: int, last: int) -> list[int]:
    """Return doubling sizes, and those halfway between from HALVES on.

    From there on a step's time grows with its tokens, so that padding costs.
    """
    sizes = _doubling(first, last)
    between = [size * 3 // 2 for size in sizes if size >= HALVES and size * 3 // 2 < last]
    return sorted(sizes + between)


def _growing_fast(first: int, last: int) -> list[int]:
    """Return every other one of the doubling sizes.

    For a small model, padding is cheaper than more compiled steps.
    """
    return sorted({*_doubling(first, last)[::2], last})


def _doubling(first: int, last: int) -> list[int]:
    """Return first, 2 first, 4 first, ... and exactly `last` at the end."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]
