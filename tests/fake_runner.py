"""A device that a person can check by hand: pages, tables and rows are lists, and the model is a
checksum.

    token at position e+1 = (sum over p = 0..e of (p + 1) * (token[p] + 1)  +  what the row's rules
    add)  mod VOCAB

The sum runs over what is read back from the pages through the row's table, so a wrong page, stale
content, a wrong prefix hit or a wrong fed-back token changes the answer, or breaks an assertion
first. If the first page group has a window, the sum begins where the window of position e does.
`naive` is the same arithmetic over a plain list of tokens. The embedding of a prompt is that sum up
to its last token, and how many tokens it has.

The draft model is the same checksum over pages of its own, under the numbers of the first page
group without a window; every third of its tokens is wrong.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import page_counts
from jaxserve.engine.events import Logprob
from jaxserve.engine.host.page_pool import NO_PAGE
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.engine.plan import (
    DRAFTED,
    FED_BACK,
    Admission,
    LaneOutput,
    LanePlan,
    StepKind,
    StepOutput,
    StepPlan,
)
from jaxserve.request import Request

VOCAB = 97
MASK_BYTES = -(-VOCAB // 32) * 4
EXECUTABLES: dict[StepKind, int] = {
    "decode": 11,
    "prefill": 23,
    "score": 37,
    "embed": 41,
    "verify": 43,
    "draft": 47,
}

Slot = tuple[int, int, float]  # position, token, noise of the arithmetic that wrote it
EMPTY: Slot = (-1, 0, nan)
Spoils = Callable[
    [int, int, int], bool
]  # step number, lane, row: whether that row's result is not finite


def weight(position: int, token: int) -> int:
    """What one token adds to the checksum."""
    return (position + 1) * (token + 1)


@dataclass(frozen=True)
class Rules:
    """What moves a row's tokens beside the tokens before: in the device, the sampling fields of the
    row.
    """

    offset: int
    end_after: int
    end_ids: frozenset[int]
    allowed: tuple[int, ...] | None
    penalised: bool
    follows: bool  # masks come with the steps

    @staticmethod
    def of_admission(a: Admission) -> "Rules":
        offset = a.seed + 5 * a.choice + sum(int(value) * (token + 1) for token, value in a.bias)
        follows = a.masked and a.allowed is None
        end_after, end_ids = a.prompt_tokens + a.min_tokens, frozenset(a.end_ids)
        return Rules(offset, end_after, end_ids, a.allowed, a.history is not None, follows)

    @staticmethod
    def of_request(request: Request, index: int, seed: int) -> "Rules":
        p = request.params
        offset = (
            seed
            + 5 * index
            + sum(int(value) * (token + 1) for token, value in p.logit_bias.items())
        )
        allowed = None if p.allowed_token_ids is None else tuple(p.allowed_token_ids)
        penalised = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0)
        end_after = len(request.prompt) + p.min_tokens
        return Rules(
            offset, end_after, request.end_ids, allowed, penalised, request.grammar is not None
        )

    def ends(self, token: int, position: int) -> bool:
        """Whether this token, at this position, is the last one."""
        return token in self.end_ids and position >= self.end_after

    def choose(self, total: int, position: int, penalty: int, mask: list[int] | None = None) -> int:
        """The token at `position`; end tokens are out before `end_after`, unless nothing else is
        allowed.

        mask: the tokens that a grammar allows; anything where it allows none.
        """
        value = total + self.offset + (penalty if self.penalised else 0)
        if mask is not None:
            return mask[value % len(mask)] if mask else 0
        if self.allowed is None and position >= self.end_after:
            return value % VOCAB
        barred = self.end_ids if position < self.end_after else frozenset()
        allowed = range(VOCAB) if self.allowed is None else self.allowed
        candidates = [token for token in allowed if token not in barred] or allowed
        return candidates[value % len(candidates)]


def naive(request: Request, index: int, seed: int, n: int, window: int | None = None) -> list[int]:
    """The first n tokens of a choice, from a plain list and without any page; fewer where a grammar
    ends it.
    """
    rules, tokens, prompt = (
        Rules.of_request(request, index, seed),
        list(request.prompt),
        len(request.prompt),
    )
    matcher = request.grammar.matcher() if request.grammar else None
    for _ in range(n):
        seen = window_of(window, len(tokens) - 1)
        total = sum(weight(p, tokens[p]) for p in seen)
        mask = tokens_in(matcher.masks()[0], rules.allowed) if matcher else None
        tokens.append(rules.choose(total, len(tokens), penalty_of(tokens, prompt), mask))
        if matcher and (
            tokens[-1] in rules.end_ids or not matcher.accept(tokens[-1]) or matcher.ended
        ):
            break
    return tokens[prompt:]


def tokens_in(mask: bytes, allowed: tuple[int, ...] | None = None) -> list[int]:
    """The tokens of a mask, of those that are allowed besides."""
    bits = int.from_bytes(mask, "little")
    return [
        token
        for token in range(8 * len(mask))
        if bits >> token & 1 and (allowed is None or token in allowed)
    ]


def naive_embedding(prompt: tuple[int, ...], window: int | None = None) -> list[float]:
    """The same for a prompt that is embedded."""
    total = sum(weight(p, prompt[p]) for p in window_of(window, len(prompt) - 1))
    return [float(total), float(len(prompt))]


def window_of(window: int | None, query: int) -> range:
    """The positions that a query sees."""
    return range(0 if window is None else max(0, query - window + 1), query + 1)


def penalty_of(tokens: list[int] | tuple[int, ...], prompt: int) -> int:
    """The prompt's tokens once, those of the output twice."""
    return sum(t + 1 for t in tokens[:prompt]) + 2 * sum(t + 1 for t in tokens[prompt:])


@dataclass
class Row:
    tables: list[list[int]]  # per page group
    length: int
    rules: Rules
    penalty: int
    token: int | None = None  # the newest
    masks: list[list[int]] | None = (
        None  # of the places that it samples next, where it follows a grammar
    )
    # The launch in which it ended itself or drafted: the next one was planned before the host knew
    # how long it is.
    ended_in: int | None = None
    drafted_in: int | None = None


@dataclass
class Chunk:
    row: Row
    start: int
    tokens: list[int]
    samples: int
    spoilt: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class DeviceLane:
    """Memory of one lane. Pages keep what was written to them until it is overwritten."""

    page_size: int
    windows: list[int | None]  # per page group
    pages: list[list[list[Slot]]]  # per page group, per page
    rows: dict[int, Row] = field(default_factory=dict)
    drafts: dict[int, list[Slot]] = field(
        default_factory=dict
    )  # the draft model's pages, by number

    def admit(self, a: Admission, width: int) -> None:
        tables = [[*pages, *[NO_PAGE] * (width - len(pages))] for pages in a.tables]
        penalty = penalty_of(a.history or (), a.prompt_tokens)
        self.rows[a.row] = Row(tables, a.length, Rules.of_admission(a), penalty)

    def chunks(
        self, plan: LanePlan, kind: StepKind, spoilt: list[bool], number: int
    ) -> list[Chunk]:
        """The plan's chunks as the device sees them: positions from the row's own length, tokens
        fed back to it.
        """
        found, at = [], 0
        for i, (row_id, size, samples) in enumerate(
            zip(plan.rows, plan.sizes, plan.samples, strict=True)
        ):
            row, sent = self.rows[row_id], plan.tokens[at : at + size]
            assert len(sent) == size and 0 <= samples <= size, "columns do not fit together"
            late = row.drafted_in == number - 1 and row.length <= plan.starts[i]
            assert late or row.ended_in in (number, number - 1) or row.length == plan.starts[i], (
                f"row {row_id} is {row.length} long; the plan says {plan.starts[i]}"
            )
            if kind == "decode":
                assert sent == [FED_BACK], "a decode step knows one fed-back token per row"
            tokens = [row.token if token == FED_BACK else token for token in sent]
            assert None not in tokens, f"row {row_id} has no token to feed back"
            if DRAFTED in tokens:
                assert kind == "verify" and tokens[1:] == [DRAFTED] * (samples - 1), (
                    "drafts follow the newest token"
                )
                tokens = self.draft(row, row.token or 0, samples - 1)
                row.drafted_in = number
            found.append(
                Chunk(
                    row,
                    row.length,
                    [token for token in tokens if token is not None],
                    samples,
                    spoilt[i],
                )
            )
            at += size
        assert at == len(plan.tokens), "tokens that belong to no chunk"
        assert len(set(plan.rows)) == len(plan.rows), "a row twice in one step"
        return found

    def place(self, plan: LanePlan) -> None:
        for group, row, index, page in plan.fresh:
            table = self.rows[row].tables[group]
            behind = window_of(self.windows[group], self.rows[row].length).start // self.page_size
            assert table[index] == NO_PAGE and NO_PAGE not in table[behind:index], (
                f"row {row}: page {index} of its table is not next"
            )
            table[index] = page

    def draft(self, row: Row, token: int, count: int) -> list[int]:
        """The newest token and what the draft model says comes after it, itself one by one; it
        reads all before.
        """
        tokens, window = [token], self.windows[0]
        for position in range(row.length, row.length + 1 + count):
            self.write_drafts(row, position, [tokens[-1]])
            seen = [self._drafted(row, p)[1] for p in range(position + 1)]
            total = sum(weight(p, seen[p]) for p in window_of(window, position))
            penalty = row.penalty + 2 * sum(token + 1 for token in tokens[1:])
            tokens.append(row.rules.choose(total, position + 1, penalty))
            tokens[-1] = (tokens[-1] + 1) % VOCAB if position % 3 == 0 else tokens[-1]
        return tokens[: 1 + count]

    def write_drafts(self, row: Row, start: int, tokens: list[int]) -> None:
        table = row.tables[self.windows.index(None)]
        for position, token in enumerate(tokens, start):
            page = table[position // self.page_size]
            assert page != NO_PAGE, f"position {position} has no page for the draft model"
            slots = self.drafts.setdefault(page, [EMPTY] * self.page_size)
            slots[position % self.page_size] = (position, token, 0)

    def _drafted(self, row: Row, position: int) -> Slot:
        """What the draft model's pages have there: the same token as the model's."""
        group, index = self.windows.index(None), position // self.page_size
        page, at = row.tables[group][index], position % self.page_size
        slot = self.drafts.get(page, [EMPTY] * self.page_size)[at]
        known = position >= row.length or slot[:2] == self.pages[group][page][at][:2]
        assert slot[0] == position and known, f"the draft model lacks position {position}"
        return slot

    def catch_up(self, plan: LanePlan) -> None:
        at, own = 0, list[set[int]]()
        seen = list[set[int]]()
        for row_id, start, size in zip(plan.rows, plan.starts, plan.sizes, strict=True):
            row = self.rows[row_id]
            assert start + size <= row.length, "the draft model runs ahead of the model"
            self.write_drafts(row, start, plan.tokens[at : at + size])
            for position in range(start + size):
                self._drafted(row, position)
            pages = row.tables[self.windows.index(None)][: (start + size - 1) // self.page_size + 1]
            seen.append(set(pages))
            own.append(set(pages[start // self.page_size :]))
            at += size
        for i, written in enumerate(own):
            assert all(written.isdisjoint(pages) for j, pages in enumerate(seen) if i != j), (
                "a page of two rows"
            )

    def mask(self, plan: LanePlan, size: int) -> None:
        """Masks, of so many bytes, hold for one step: a row that follows a grammar and lacks them
        cannot sample.
        """
        for row in self.rows.values():
            row.masks = None
        for row, words in plan.masks:
            assert self.rows[row].rules.follows and row in plan.rows and len(words) % size == 0
            self.rows[row].masks = [
                tokens_in(words[at : at + size]) for at in range(0, len(words), size)
            ]

    def write(self, chunks: list[Chunk], noise: Callable[[Chunk], float]) -> None:
        written: set[tuple[int, int, int]] = set()
        for chunk in chunks:
            for group, table in enumerate(chunk.row.tables):
                for position, token in enumerate(chunk.tokens, chunk.start):
                    page, at = table[position // self.page_size], position % self.page_size
                    assert page != NO_PAGE, f"position {position} has no page"
                    assert (group, page, at) not in written, (
                        f"page {page} is written twice in one step"
                    )
                    written.add((group, page, at))
                    self.pages[group][page][at] = (position, token, noise(chunk))

    def read(self, row: Row, query: int) -> float:
        """Checksum of what the query at this position sees in the first group; in the others it
        sees the same.
        """
        groups = [
            {p: self._slot(pages, table, p) for p in window_of(window, query)}
            for window, pages, table in zip(self.windows, self.pages, row.tables, strict=True)
        ]
        for other in groups[1:]:
            common = groups[0].keys() & other.keys()
            assert all(groups[0][p][:2] == other[p][:2] for p in common), "page groups differ"
        unseen = sum(
            0 * slot[2] for other in groups[1:] for slot in other.values()
        )  # NaN shows wherever it is
        return sum(weight(p, slot[1]) + slot[2] for p, slot in groups[0].items()) + unseen

    def _slot(self, pages: list[list[Slot]], table: list[int], position: int) -> Slot:
        slot = pages[table[position // self.page_size]][position % self.page_size]
        assert slot[0] == position, (
            f"position {position} reads what was written for position {slot[0]}"
        )
        return slot

    def verify(self, chunk: Chunk, offset: int) -> tuple[list[int], bool]:
        """Accepted tokens and the one after them, and whether all was finite."""
        row, new = chunk.row, list[int]()
        self.read(row, chunk.start)  # the query that reaches back furthest
        for position in range(chunk.end - max(chunk.samples, 1), chunk.end):
            total = self.read(row, position) + (nan if chunk.spoilt else 0)
            if not isfinite(total):
                return [0] * min(chunk.samples, 1), False
            if not chunk.samples:
                return [], True
            mask = (
                self._mask_at(row, position - (chunk.end - chunk.samples))
                if row.rules.follows
                else None
            )
            new.append(row.rules.choose(int(total) + offset, position + 1, row.penalty, mask))
            row.penalty += 2 * (new[-1] + 1)
            if position + 1 < chunk.end and chunk.tokens[position + 1 - chunk.start] != new[-1]:
                break
        return new, True

    def _mask_at(self, row: Row, place: int) -> list[int]:
        """Nothing for a place behind the end of the text."""
        assert row.masks, "a row that follows a grammar has no mask"
        return row.masks[place] if place < len(row.masks) else []

    def embed(self, chunk: Chunk, offset: int) -> list[float]:
        """As if the prompt ended with the chunk."""
        return [self.read(chunk.row, chunk.end - 1) + offset, float(chunk.end)]

    def advance(self, chunk: Chunk, new: list[int]) -> None:
        chunk.row.length = chunk.end - chunk.samples + len(new)
        chunk.row.token = new[-1] if new else chunk.row.token


class FakeRunner:
    """Implements engine.Runner. A step runs when it is launched; its output is handed over when it
    is collected.

    executables_differ: as on real hardware, the last bits depend on the kind of step and on the
    chunk's borders; what was written by another kind of step, or cut otherwise, then leads to other
    tokens. mask_bytes: of one mask of a grammar, whose tokens may be others than the arithmetic's.
    spoils: rows that are not finite; whatever such a step wrote makes every later reader non-finite
    too.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        executables_differ: bool = False,
        spoils: Spoils = lambda number, lane, row: False,
        mask_bytes: int = MASK_BYTES,
    ):
        self.config = config
        self.executables_differ = executables_differ
        self.spoils = spoils
        self.mask_bytes = mask_bytes
        self.lanes = [
            DeviceLane(
                config.page_size,
                [pool.window for pool in config.pools],
                [[[EMPTY] * config.page_size for _ in range(pool.pages)] for pool in config.pools],
            )
            for _ in range(config.lanes)
        ]
        self.window = config.pools[0].window
        self._launched: deque[StepOutput] = deque()
        self._newest = 0

    def launch(self, plan: StepPlan) -> StepOutput:
        assert len(self._launched) < 2, "more than one step runs ahead"
        assert plan.number == self._newest + 1, f"step {plan.number} after step {self._newest}"
        self._newest = plan.number
        for admission in plan.admissions:
            self.lanes[admission.lane].admit(admission, self.config.pages_per_row)
        output = StepOutput(tuple(self._run(plan, lane) for lane in range(self.config.lanes)))
        self._launched.append(output)
        return output

    def collect(self, plan: StepPlan, handle: StepOutput) -> StepOutput:
        assert self._launched.popleft() is handle, (
            "steps are collected in the order of their launch"
        )
        return handle

    def read_pages(self, lane: int, group: int, ids: Sequence[int]) -> "PagesRead":
        assert len(ids) in page_counts(self.config)
        slots = [slot for page in ids for slot in self.lanes[lane].pages[group][page]]
        return PagesRead(np.array(slots, np.float32)[None, :, None])

    def check_segment(self, segment: KVSegment) -> None:
        assert segment.group < len(self.config.pools)

    def upload_pages(self, group: int, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return arrays["k"].copy()

    def move_pages(self, group: int, read: "PagesRead") -> np.ndarray:
        return read.k.copy()

    def write_pages(self, lane: int, group: int, ids: Sequence[int], uploaded: np.ndarray) -> None:
        size = self.config.page_size
        assert len(ids) in page_counts(self.config) and uploaded.shape == (1, len(ids) * size, 1, 3)
        slots = [
            (int(position), int(token), noise)
            for position, token, noise in uploaded[0, :, 0].tolist()
        ]
        for i, page in enumerate(ids):
            if page != NO_PAGE:
                self.lanes[lane].pages[group][page] = slots[i * size : (i + 1) * size]

    def close(self) -> None:
        pass

    def _run(self, plan: StepPlan, index: int) -> LaneOutput:
        lane, columns = self.lanes[index], plan.lanes[index]
        lane.place(columns)
        lane.mask(columns, self.mask_bytes)
        spoilt = [self.spoils(plan.number, index, row) for row in columns.rows]
        if plan.kind == "draft":
            lane.catch_up(columns)
            return LaneOutput([[] for _ in columns.rows], [True] * len(columns.rows))
        if plan.steps > 1:
            return self._several(plan, lane, columns, spoilt)
        chunks = lane.chunks(columns, plan.kind, spoilt, plan.number)
        lane.write(chunks, lambda chunk: self._noise(plan.kind, chunk))
        results = [lane.verify(chunk, self._noise_of_kind(plan.kind)) for chunk in chunks]
        for chunk, (new, _) in zip(chunks, results, strict=True):
            lane.advance(chunk, new)
        output = LaneOutput([new for new, _ in results], [finite for _, finite in results])
        if plan.kind == "embed":
            output.embeddings = [
                lane.embed(chunk, self._noise_of_kind("embed")) for chunk in chunks
            ]
        if columns.logprobs:
            output.logprobs = [
                _logprobs(new, chunk.row.length)
                for chunk, new in zip(chunks, output.tokens, strict=True)
            ]
        if plan.kind == "score":
            positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
            output.prompt_logprobs = [
                Logprob(t, -float(p), ()) for t, p in zip(columns.targets, positions, strict=True)
            ]
        return output

    def _several(
        self, plan: StepPlan, lane: DeviceLane, columns: LanePlan, spoilt: list[bool]
    ) -> LaneOutput:
        """Decodes of the rows one after the other, each row until its size is reached or it
        ends."""
        assert (
            plan.kind == "decode"
            and columns.sizes == columns.samples
            and max(columns.sizes, default=1) <= plan.steps
        )
        assert columns.tokens == [FED_BACK] * sum(columns.sizes)
        output = LaneOutput([[] for _ in columns.rows], [True] * len(columns.rows))
        logprobs: list[list[Logprob]] = [[] for _ in columns.rows]
        rows, stopped = [lane.rows[row] for row in columns.rows], set[int]()
        for step in range(plan.steps):
            going = [i for i, size in enumerate(columns.sizes) if step < size and i not in stopped]
            one = LanePlan(
                rows=[columns.rows[i] for i in going],
                starts=[columns.starts[i] + step for i in going],
                sizes=[1] * len(going),
                samples=[1] * len(going),
                tokens=[FED_BACK] * len(going),
            )
            now = [
                spoilt[i] and step == plan.number % columns.sizes[i] for i in going
            ]  # in the first decode, or later
            chunks = lane.chunks(one, "decode", now, plan.number)
            lane.write(chunks, lambda chunk: self._noise("decode", chunk))
            for i, chunk in zip(going, chunks, strict=True):
                new, finite = lane.verify(chunk, self._noise_of_kind("decode"))
                lane.advance(chunk, new)
                output.tokens[i] += new
                output.finite[i] &= finite
                logprobs[i] += _logprobs(new, rows[i].length)
                if not finite or rows[i].rules.ends(new[-1], rows[i].length):
                    rows[i].ended_in = plan.number
                    stopped.add(i)
        output.logprobs = logprobs if columns.logprobs else None
        return output

    def _noise_of_kind(self, kind: StepKind) -> int:
        return EXECUTABLES[kind] if self.executables_differ else 0

    def _noise(self, kind: StepKind, chunk: Chunk) -> float:
        if chunk.spoilt:
            return nan
        return (
            EXECUTABLES[kind] + 3 * chunk.start + 7 * len(chunk.tokens)
            if self.executables_differ
            else 0
        )


@dataclass
class PagesRead:
    """Slots in place of keys, as they were."""

    k: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.k.nbytes

    def start_to_host(self) -> None:
        pass

    def to_host(self) -> dict[str, np.ndarray]:
        return {"k": self.k}


def _logprobs(new: list[int], length: int) -> list[Logprob]:
    """Minus the position of the token before: a number that a test can check."""
    return [Logprob(token, -float(length - len(new) + n), ()) for n, token in enumerate(new)]
