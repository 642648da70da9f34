"""The plain data that crosses Engine.step(): what the host decided (StepPlan) and what came of it
(StepOutput).

Columns of ints instead of an object per row: cheap to build, to log, to replay and to send to other
hosts.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Literal

StepKind = Literal["decode", "prefill", "score", "embed", "verify", "draft"]
MEASURED = 0  # StepPlan.number of a step that nobody asked for
NO_PAGE = -1  # in a table of pages: a page that was given back, since no query sees it any more
FED_BACK = -1  # in LanePlan.tokens: the token that the device sampled last for this row
DRAFTED = -2  # there as well: a token that the device drafts in this step


@dataclass(slots=True)
class LanePlan:
    """The chunks of one lane. Entry i of every column up to `samples` belongs to chunk i.

    In a step of another kind than decode that is launched, chunks of one token come first. In a
    decode step, `sizes` (and `samples`, which is the same) says how many decodes each row takes,
    each feeding the next. An embed step samples nothing. Nor does a draft step: its chunks, of
    known tokens, go through the draft model alone.

    A row whose drafts the device makes is planned before the host has read how many of the last
    ones were right: `starts` is then the most that it may be. Only a draft step begins where
    `starts` says.
    """

    sequences: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # position of the chunk's first token
    sizes: list[int] = field(default_factory=list)
    samples: list[int] = field(
        default_factory=list
    )  # 0 or 1; verify steps: and drafted tokens; decode steps: as sizes
    tokens: list[int] = field(default_factory=list)  # of all chunks, packed
    targets: list[int] = field(
        default_factory=list
    )  # score steps only: the token after each of `tokens`
    # New pages, one entry each: page group, row, index in the row's table, page id.
    fresh: list[tuple[int, int, int, int]] = field(default_factory=list)
    logprobs: bool = False  # some row wants log-probabilities
    # Of rows that follow a grammar, if they sample: row, and the mask of each place (see
    # structure.Matcher).
    masks: list[tuple[int, bytes]] = field(default_factory=list)

    def put_single_tokens_first(self) -> None:
        """Reorder the chunks so that those of one token come first: kernels take them apart."""
        alone = [size == 1 for size in self.sizes]
        if alone == sorted(alone, reverse=True):
            return
        order = sorted(range(len(alone)), key=lambda i: not alone[i])
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
    """A sequence enters a row: everything the device keeps about it."""

    lane: int
    row: int
    length: int  # positions already in pages (a prefix hit)
    tables: tuple[tuple[int, ...], ...]  # pages so far, per page group
    prompt_tokens: int
    choice: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int  # alternatives asked for; -1: no log-probabilities
    min_tokens: int
    end_ids: tuple[int, ...]
    bias: tuple[tuple[int, float], ...]
    allowed: tuple[int, ...] | None  # None where masks come with the steps
    masked: bool  # only some tokens may be chosen
    history: tuple[int, ...] | None  # prompt and output so far, when a penalty must count them


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch for the device: admissions are written first, then the chunks run. steps: decodes
    of a row at most.
    """

    number: int
    kind: StepKind
    lanes: tuple[LanePlan, ...]
    admissions: tuple[Admission, ...]
    steps: int = 1

    @property
    def num_rows(self) -> int:
        """The largest lane's chunks."""
        return max(len(lane.rows) for lane in self.lanes)

    @property
    def num_tokens(self) -> int:
        """The largest lane's tokens."""
        return max(len(lane.tokens) for lane in self.lanes)

    @property
    def drafts(self) -> int:
        """The most drafted tokens of a row; 0 in steps that verify nothing."""
        return (
            max((max(lane.samples, default=1) for lane in self.lanes), default=1) - 1
            if self.kind == "verify"
            else 0
        )


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the model's own distribution, and of the most probable
    alternatives.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class LaneOutput:
    """What the device returned for the chunks of one lane, in the plan's order."""

    tokens: list[
        list[int]
    ]  # accepted and sampled, per chunk; none where it samples nothing, fewer where a row ended
    finite: list[bool]
    logprobs: list[list[Logprob]] | None = None  # like tokens; None when no row asked
    prompt_logprobs: list[Logprob] | None = None  # score steps: per packed token, of its target
    embeddings: list[list[float]] | None = None  # embed steps: per chunk, of its last token


@dataclass(slots=True)
class StepOutput:
    lanes: tuple[LaneOutput, ...]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. stopped_by: the token id that ended it, None otherwise."""

    reason: FinishReason
    stopped_by: int | None = None
    error: Exception | None = None


@dataclass(slots=True)
class Times:
    """Monotonic seconds of one choice; 0 where it never came to that. cached: prompt tokens in the
    prefix cache.

    verifications: steps that verified drafts. drafted, accepted: their tokens, and those of them
    that were right.
    """

    submitted: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    cached: int = 0
    preemptions: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class TokenEvent:
    """News of one choice: new tokens, and its end once."""

    request_id: str
    index: int
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
    embedding: list[float] | None = None  # of the prompt, with finish
    finish: Finish | None = None
    times: Times | None = None  # with the first token and with finish
