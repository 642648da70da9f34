"""FakeRunner: an engine's runner over the fake device, whose answers a person can check by hand."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.config.kv_policy import NO_PAGE
from jaxserve.engine.buckets import page_counts
from jaxserve.engine.events import Logprob
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.engine.plan import (
    FED_BACK,
    LaneOutput,
    LanePlan,
    StepKind,
    StepOutput,
    StepPlan,
)
from tests.fake_device import Chunk, DeviceLane
from tests.fake_groups import FakeGroup, Slot, groups_of
from tests.fake_model import MASK_BYTES

EXECUTABLES: dict[StepKind, int] = {
    "decode": 11,
    "prefill": 23,
    "score": 37,
    "embed": 41,
    "verify": 43,
    "draft": 47,
}
# Takes step number, lane and row: whether the row's result in that step is not finite.
Spoils = Callable[[int, int, int], bool]


class FakeRunner:
    """Implements engine.Runner: a step runs at its launch and is handed over when collected.

    executables_differ: as on real hardware, the last bits depend on the kind of step and on the
    chunk's borders; what was written by another kind of step, or cut otherwise, then leads to other
    tokens. mask_bytes: length of one mask of a grammar, which may be of another vocabulary. spoils:
    rows that are not finite; whatever such a step wrote makes every later reader non-finite too.
    groups: what the layers of the model keep; None: plain pages, and slots where config has them.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        executables_differ: bool = False,
        spoils: Spoils = lambda number, lane, row: False,
        mask_bytes: int = MASK_BYTES,
        groups: tuple[FakeGroup, ...] | None = None,
    ):
        self.config = config
        self.executables_differ = executables_differ
        self.spoils = spoils
        self.mask_bytes = mask_bytes
        self.groups = groups or groups_of(config)
        self.lanes = [DeviceLane.empty(config, self.groups) for _ in range(config.lanes)]
        self.window = self.groups[0].window
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

    def close(self) -> None:
        pass

    # ---- Pages for other engines: slots in place of keys

    def read_pages(self, lane: int, group: int, ids: Sequence[int]) -> "PagesRead":
        assert len(ids) in ((1,) if self.groups[group].slot else page_counts(self.config))
        slots = [slot for page in ids for slot in self.lanes[lane].pages[group][page]]
        return PagesRead(self.groups[group].arrays(slots))

    def check_segment(self, segment: KVSegment) -> None:
        assert segment.group < len(self.config.pools)
        self.groups[segment.group].slots(segment.arrays)

    def upload_pages(self, group: int, arrays: Mapping[str, np.ndarray]) -> list[Slot]:
        return self.groups[group].slots(arrays)

    def move_pages(self, group: int, read: "PagesRead") -> list[Slot]:
        return self.groups[group].slots(read.arrays)

    def write_pages(self, lane: int, group: int, ids: Sequence[int], uploaded: list[Slot]) -> None:
        size = len(uploaded) if self.groups[group].slot else self.config.page_size
        assert len(ids) in page_counts(self.config) and len(uploaded) == len(ids) * size
        for i, page in enumerate(ids):
            if page != NO_PAGE:
                self.lanes[lane].pages[group][page] = uploaded[i * size : (i + 1) * size]

    # ---- Steps

    def _run(self, plan: StepPlan, index: int) -> LaneOutput:
        lane = self.lanes[index]
        columns = plan.lanes[index]
        lane.place(columns)
        lane.mask(columns, self.mask_bytes)
        spoilt = [self.spoils(plan.number, index, row) for row in columns.rows]
        if plan.kind == "draft":
            lane.catch_up(columns)
            return LaneOutput([[] for _ in columns.rows], [True] * len(columns.rows))
        if plan.steps > 1:
            return self._run_decodes(plan, lane, columns, spoilt)
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

    def _run_decodes(
        self, plan: StepPlan, lane: DeviceLane, columns: LanePlan, spoilt: list[bool]
    ) -> LaneOutput:
        """Run several decodes, each row until its size is reached or it ends."""
        assert (
            plan.kind == "decode"
            and columns.sizes == columns.samples
            and max(columns.sizes, default=1) <= plan.steps
        )
        assert columns.tokens == [FED_BACK] * sum(columns.sizes)
        output = LaneOutput([[] for _ in columns.rows], [True] * len(columns.rows))
        logprobs: list[list[Logprob]] = [[] for _ in columns.rows]
        rows = [lane.rows[row] for row in columns.rows]
        stopped = set[int]()
        for step in range(plan.steps):
            going = [i for i, size in enumerate(columns.sizes) if step < size and i not in stopped]
            one = LanePlan(
                rows=[columns.rows[i] for i in going],
                starts=[columns.starts[i] + step for i in going],
                sizes=[1] * len(going),
                samples=[1] * len(going),
                tokens=[FED_BACK] * len(going),
            )
            # A spoilt row is so from one of its decodes on: the first, or a later one.
            now = [spoilt[i] and step == plan.number % columns.sizes[i] for i in going]
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
        if not self.executables_differ:
            return 0
        return EXECUTABLES[kind] + 3 * chunk.start + 7 * len(chunk.tokens)


@dataclass
class PagesRead:
    """Pages that were read, already on the host."""

    arrays: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays.values())

    def start_to_host(self) -> None:
        pass

    def to_host(self) -> dict[str, np.ndarray]:
        return self.arrays


def _logprobs(new: list[int], length: int) -> list[Logprob]:
    """Return minus the position before each token: numbers that a test can check."""
    return [Logprob(token, -float(length - len(new) + n), ()) for n, token in enumerate(new)]
