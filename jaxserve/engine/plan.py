"""Plain data that crosses the border between host and device: a step's plan and its output.

The host decides a StepPlan, the device answers with a StepOutput. Both hold columns of ints instead
of an object per row: cheap to build, to log, to replay and to send to other hosts.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from jaxserve.engine.events import Logprob
from jaxserve.engine.row_fields import ROW_BYTES, RowSampling, unpack_row

StepKind = Literal["decode", "prefill", "score", "embed", "verify", "draft"]
MEASURED = 0  # StepPlan.number of a step that only measures how long steps take
FED_BACK = -1  # in LanePlan.tokens: the token that the device sampled last for this row
DRAFTED = -2  # in LanePlan.tokens: a token that the device drafts in this step


@dataclass(slots=True)
class LanePlan:
    """Chunks of one lane; entry i of every column up to `samples` belongs to chunk i.

    In every kind of step but decode, chunks of one token come first. In a decode step, `sizes` and
    `samples` are equal and say how many decodes each row takes, each feeding the next. Embed steps
    sample nothing. Draft steps do not either: they run chunks of known tokens through the draft
    model alone.

    Rows for which the device drafts are planned before the host has read how many of the last
    drafted tokens were accepted: `starts` is then an upper bound, and the device goes on from the
    row's own length. Only a draft step begins exactly where `starts` says.
    """

    sequences: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # position of the chunk's first token
    sizes: list[int] = field(default_factory=list)
    # Tokens sampled from the chunk: 0 or 1; 1 + drafted tokens in verify steps; `sizes` in decode
    # steps.
    samples: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of all chunks, packed
    # The token after each of `tokens`, to be scored; read in score steps only.
    targets: list[int] = field(default_factory=list)
    # New pages, one entry each: page group, row, index in the row's table, page id.
    fresh: list[tuple[int, int, int, int]] = field(default_factory=list)
    logprobs: bool = False  # at least one row wants log-probabilities
    # For each row that follows a grammar and samples: the row, and one mask per sampled token (see
    # structure.Matcher), concatenated.
    masks: list[tuple[int, bytes]] = field(default_factory=list)

    def put_single_tokens_first(self) -> None:
        """Reorder the chunks so that chunks of one token come first: kernels treat them apart."""
        single = [size == 1 for size in self.sizes]
        if single == sorted(single, reverse=True):
            return
        order = sorted(range(len(single)), key=lambda i: not single[i])
        ends = list(accumulate(self.sizes))
        for name in ("tokens", "targets"):
            column = getattr(self, name)
            parts = [column[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]
            setattr(self, name, [token for i in order for token in parts[i]])
        for name in ("sequences", "rows", "starts", "samples", "sizes"):
            column = getattr(self, name)
            setattr(self, name, [column[i] for i in order])


@dataclass(frozen=True, slots=True)
class Admission:
    """Everything that the device keeps about a sequence while it occupies a row."""

    lane: int
    row: int
    length: int  # positions already in pages (a prefix hit)
    tables: tuple[tuple[int, ...], ...]  # pages so far, per page group
    packed: bytes  # the row's small fields, see row_fields.pack_row; read them as `sampling`
    prompt_tokens: int
    bias: tuple[tuple[int, float], ...]
    # The only tokens that may be chosen; None: any, or those of masks that come with the steps.
    allowed: tuple[int, ...] | None
    history: tuple[int, ...] | None  # prompt and output so far, when a penalty must count them

    def __post_init__(self) -> None:
        if len(self.packed) != ROW_BYTES:
            raise ValueError(f"a row's fields have {len(self.packed)} bytes, not {ROW_BYTES}")

    @property
    def sampling(self) -> RowSampling[Any]:
        """The row's small fields as numbers; floats have the precision of float32."""
        return unpack_row(self.packed)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch for the device: it writes the admissions first and then runs the chunks.

    `steps` is the most decodes that any row takes in this launch.
    """

    number: int
    kind: StepKind
    lanes: tuple[LanePlan, ...]
    admissions: tuple[Admission, ...]
    steps: int = 1

    @property
    def num_rows(self) -> int:
        """Chunks of the lane that has most."""
        return max(len(lane.rows) for lane in self.lanes)

    @property
    def num_tokens(self) -> int:
        """Tokens of the lane that has most."""
        return max(len(lane.tokens) for lane in self.lanes)

    @property
    def drafts(self) -> int:
        """Drafted tokens of the row that has most; 0 in steps that verify nothing."""
        if self.kind != "verify":
            return 0
        return max(max(lane.samples, default=1) for lane in self.lanes) - 1


@dataclass(slots=True)
class LaneOutput:
    """Results for the chunks of one lane, in the order of the plan."""

    # Accepted and sampled tokens of each chunk: empty if the chunk samples nothing, fewer than
    # planned if a drafted token was rejected or the row ended.
    tokens: list[list[int]]
    finite: list[bool]
    logprobs: list[list[Logprob]] | None = None  # like tokens; None when no row asked
    prompt_logprobs: list[Logprob] | None = None  # score steps: one per packed token's target
    embeddings: list[list[float]] | None = None  # embed steps: per chunk, of its last token


@dataclass(slots=True)
class StepOutput:
    """Results of one step, by lane."""

    lanes: tuple[LaneOutput, ...]
