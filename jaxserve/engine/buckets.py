"""Every shape a step can have, in one place: for warm-up, ahead-of-time compilation and serving
alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxserve.config import EngineConfig
from jaxserve.engine.plan import StepKind
from jaxserve.errors import EngineError

MIN_TOKENS = 16
HALVES = 64
SEGMENT_TOKENS = (
    512  # whose pages are read or written at once for other engines, unless one page has more
)
SEGMENTS_ON_DEVICE = (
    4  # of them on the devices: read and not yet on the host, or uploaded and not yet written
)


@dataclass(frozen=True, order=True)
class Bucket:
    """rows: chunks per lane. tokens: query tokens per lane, packed (decode: one per row).

    steps: decode steps that are launched as one. drafts: drafted tokens of a row that are verified,
    at most.
    """

    kind: StepKind
    rows: int
    tokens: int
    steps: int = 1
    drafts: int = 0

    def fresh_pages(self, page_size: int) -> int:
        """The most pages that a step of this shape can begin, per page group."""
        return self.tokens * self.steps // page_size + self.rows

    @property
    def most(self) -> int | None:
        """The most tokens that one row can have; None: all of them."""
        return 1 + self.drafts if self.kind in ("decode", "verify") else None

    @property
    def results(self) -> int:
        """The most tokens that come of one row."""
        return max(self.steps, 1 + self.drafts)

    def __str__(self) -> str:
        if self.kind == "decode":
            return f"decode[{self.rows}]" + (f" x {self.steps}" if self.steps > 1 else "")
        if self.kind == "verify":
            return f"verify[{self.rows} x {self.drafts}]"
        return f"{self.kind}[{self.rows}x{self.tokens}]"


@dataclass(frozen=True)
class BucketPlan:
    buckets: tuple[Bucket, ...]

    @staticmethod
    def of(config: EngineConfig) -> "BucketPlan":
        """Decode steps over doubling rows, one by one and several as one; prefill steps over
        growing tokens.

        With speculation, steps that verify drafts, over the same rows; with a draft model, steps of
        it alone, over growing tokens. One of each under `deterministic`. A model that embeds has
        embed steps, over growing tokens, and no others.
        """
        rows = _doubling(config.min_rows, max(config.max_batch, config.min_rows))
        tokens = _growing(MIN_TOKENS, max(config.step_tokens, MIN_TOKENS))
        if config.deterministic:
            rows, tokens = rows[-1:], tokens[-1:]
        most = rows[-1]
        if config.embeds:
            return BucketPlan(tuple(Bucket("embed", most, t) for t in tokens))
        return BucketPlan(
            tuple(
                [
                    Bucket("decode", r, r, steps)
                    for steps in sorted({1, config.decode_steps})
                    for r in rows
                ]
                + [
                    Bucket("verify", r, min(r * (1 + k), max(config.step_tokens, r)), drafts=k)
                    for k in drafts_of(config.draft_tokens)
                    for r in rows
                ]
                + [Bucket("prefill", most, t) for t in tokens]
                + [Bucket("score", most, tokens[-1])]
                + [
                    Bucket("draft", most, t)
                    for t in _growing_fast(MIN_TOKENS, tokens[-1])
                    if config.drafts_by_model
                ]
            )
        )

    def reachable(
        self,
        prompts: Sequence[tuple[int, int]],
        *,
        config: EngineConfig,
        score: bool,
        forced: bool = False,
    ) -> tuple[Bucket, ...]:
        """The buckets that these sequences can lead to, each given as (prompt tokens, max_tokens).

        forced: grammars may force tokens of an output, which are computed as those of a prompt are.
        """
        rows = min(len(prompts), config.max_batch)
        alone = (
            len(prompts) == 1
        )  # nobody else: it is never preempted, so only its prompt is ever prefilled
        most = sum(
            prompt if alone and not forced else prompt + output for prompt, output in prompts
        )
        least = 1 if forced else min(prompt for prompt, _ in prompts)
        chunks = min(least, config.step_tokens), min(most, config.step_tokens)
        if config.embeds:
            return self._span("embed", *chunks)
        longest = max(
            output for _, output in prompts
        )  # the prompt's step gives the first token of it
        decode = tuple(b for b in self._span("decode", 1, rows) if b.steps < max(longest, 2))
        prefill = self._span("prefill", *chunks)
        widest = max(b.rows for b in decode)
        verify = tuple(b for b in self.buckets if b.kind == "verify" and b.rows <= widest)
        behind = min(
            sum(map(sum, prompts)), config.step_tokens
        )  # tokens that a draft model may lack
        draft = self._span("draft", 1, behind) if config.drafts_by_model else ()
        return decode + verify + prefill + draft + (self._span("score", 1, 1) if score else ())

    def _span(self, kind: StepKind, least: int, most: int) -> tuple[Bucket, ...]:
        """Buckets from the first that holds `least` tokens to the first that holds `most`."""
        sizes = sorted(b.tokens for b in self.buckets if b.kind == kind)
        low = next(size for size in sizes if size >= least)
        high = next(size for size in sizes if size >= most)
        return tuple(b for b in self.buckets if b.kind == kind and low <= b.tokens <= high)


def choose(
    available: Iterable[Bucket],
    kind: StepKind,
    rows: int,
    tokens: int,
    steps: int = 1,
    drafts: int = 0,
) -> Bucket:
    """The smallest bucket that holds the step; EngineError when none of those compiled does.

    tokens: of all `steps` together.
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
    """How many pages are read or written at once for other engines: the most, a quarter of that,
    ..., 1.
    """
    counts = [min(max(SEGMENT_TOKENS // config.page_size, 1), config.pages_per_row)]
    while counts[-1] > 1:
        counts.append(max(counts[-1] // 4, 1))
    return tuple(counts)


def split_pages(pages: int, config: EngineConfig) -> Iterator[int]:
    """Numbers of page_counts that add up to `pages`, the largest first: nothing is padded."""
    for count in page_counts(config):
        yield from [count] * (pages // count)
        pages %= count


def drafts_of(most: int) -> tuple[int, ...]:
    """How many drafted tokens of a row steps are compiled for: 1, 3, 7 ..., so that chunks are
    powers of two.
    """
    return tuple(size - 1 for size in _doubling(2, 1 + most)) if most else ()


def _growing(first: int, last: int) -> list[int]:
    """Doubling, and halfway between from HALVES on: there a step's time grows with its tokens."""
    sizes = _doubling(first, last)
    between = [size * 3 // 2 for size in sizes if size >= HALVES and size * 3 // 2 < last]
    return sorted(sizes + between)


def _growing_fast(first: int, last: int) -> list[int]:
    """Every other one of the doubling: of a small model, padding is cheaper than more steps."""
    return sorted({*_doubling(first, last)[::2], last})


def _doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... ending in exactly `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]
