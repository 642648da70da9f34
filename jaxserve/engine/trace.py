"""Timeline of an engine's steps, as a file that ui.perfetto.dev opens.

The file is in the Trace Event Format
(docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), which chrome://tracing
reads as well.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.engine.engine import Engine
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.plan import LanePlan, StepPlan
from jaxserve.errors import ConfigError

# Ids of the timeline's groups of tracks.
HOST = 1
DEVICES = 2
ROWS = 3
GROUPS = {HOST: "host", DEVICES: "devices", ROWS: "rows"}
MICROSECONDS = 1e6  # in a second: the format's unit


@dataclass(frozen=True)
class _Chunk:
    """Tokens of one sequence in a step, as they were planned."""

    track: int
    name: str
    args: dict[str, Any]


class StepTrace:
    """Records what an engine does while the block of this context manager runs.

    The host's track has launches and waits. A step on the devices' track lasts from the end of the
    step before, or its launch, to the moment in which the host has its output. Each row of the
    engine has a track of the chunks that were computed in it, with marks where a sequence enters it
    and where it has lost it to others. Curves show rows in use, sequences that wait, and pages.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic):
        self._engine = engine
        self._runner = engine.runner
        self._clock = clock
        self._began = clock()
        self._done = self._began  # when the last step's output had come
        # Of sequences, when they were last seen.
        known = engine.scheduler.queue.sequences.values()
        self._preemptions = Counter({seq.id: seq.times.preemptions for seq in known})
        self._newest_track: dict[int, int] = {}  # of sequences
        self._tracks: dict[int, str] = {}
        # Steps on their way, by number: when their launch began, and their chunks.
        self._launched: dict[int, tuple[float, list[_Chunk]]] = {}
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "StepTrace":
        self._engine.runner = self
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.runner = self._runner

    def to_json(self) -> str:
        """Return the file's contents."""
        names = [
            _metadata("process_name", group, 0, {"name": name}) for group, name in GROUPS.items()
        ]
        names += [
            _metadata("thread_name", ROWS, track, {"name": name})
            for track, name in sorted(self._tracks.items())
        ]
        return json.dumps({"traceEvents": names + self.events, "displayTimeUnit": "ms"})

    # ---- the runner that the engine sees

    def launch(self, plan: StepPlan) -> Any:
        """Launch a step with the engine's runner."""
        began = self._clock()
        handle = self._runner.launch(plan)
        ended = self._clock()
        self._add(HOST, 0, f"launch {plan.number}", began, ended, {})
        self._count(began)
        self._launched[plan.number] = (began, list(self._chunks(plan, began)))
        return handle

    def collect(self, plan: StepPlan, handle: Any) -> Any:
        """Wait for a step's output with the engine's runner."""
        began = self._clock()
        output = self._runner.collect(plan, handle)
        ended = self._clock()
        self._add(HOST, 0, f"wait {plan.number}", began, ended, {})
        launched, chunks = self._launched.pop(plan.number, (self._began, []))
        start = max(self._done, launched)
        self._done = ended
        args = {
            "number": plan.number,
            "chunks": sum(len(lane.rows) for lane in plan.lanes),
            "tokens": sum(map(sum, (lane.sizes for lane in plan.lanes))),
            "admissions": len(plan.admissions),
        }
        steps = f" x {plan.steps}" if plan.steps > 1 else ""
        self._add(DEVICES, 0, f"{plan.kind}{steps}", start, ended, args)
        for chunk in chunks:
            self._add(ROWS, chunk.track, chunk.name, start, ended, chunk.args)
        return output

    def close(self) -> None:
        """Free the device memory of the engine's runner."""
        self._runner.close()

    # ---- what a plan says

    def _chunks(self, plan: StepPlan, now: float) -> Iterator[_Chunk]:
        entered = {(admission.lane, admission.row): admission for admission in plan.admissions}
        for number, lane in enumerate(plan.lanes):
            for at, row in enumerate(lane.rows):
                track = self._track(number, row)
                seq = self._engine.scheduler.queue.sequences.get(lane.sequences[at])
                self._newest_track[lane.sequences[at]] = track
                if admission := entered.get((number, row)):
                    self._mark_entry(track, seq, admission.length, admission.prompt_tokens, now)
                yield _chunk(plan, lane, at, track, seq)
        self._mark_preemptions(now)

    def _track(self, lane: int, row: int) -> int:
        config = self._engine.scheduler.config
        track = lane * config.max_batch + row
        self._tracks[track] = f"lane {lane} row {row}" if config.lanes > 1 else f"row {row}"
        return track

    def _mark_entry(
        self, track: int, seq: Sequence | None, cached: int, prompt_tokens: int, now: float
    ) -> None:
        args = {"cached tokens": cached, "prompt tokens": prompt_tokens}
        again = seq is not None and seq.times.preemptions > 0
        self._mark(track, f"{_name(seq)} enters{' again' if again else ''}", now, args)

    def _mark_preemptions(self, now: float) -> None:
        for seq in self._engine.scheduler.queue.sequences.values():
            if seq.times.preemptions > self._preemptions[seq.id]:
                self._preemptions[seq.id] = seq.times.preemptions
                track = self._newest_track.get(seq.id)
                if track is not None:
                    self._mark(track, f"{_name(seq)} is preempted", now, {})

    # ---- events of the format

    def _add(
        self, group: int, track: int, name: str, began: float, ended: float, args: dict[str, Any]
    ) -> None:
        duration = (ended - began) * MICROSECONDS
        self.events.append(
            {"ph": "X", "pid": group, "tid": track, "name": name, "args": args}
            | {"ts": self._time(began), "dur": duration}
        )

    def _mark(self, track: int, name: str, now: float, args: dict[str, Any]) -> None:
        self.events.append(
            {"ph": "i", "s": "t", "pid": ROWS, "tid": track, "name": name, "args": args}
            | {"ts": self._time(now)}
        )

    def _count(self, now: float) -> None:
        scheduler = self._engine.scheduler
        pools = [pool for lane in scheduler.lanes for pool in lane.page_pools]
        counts = {
            "rows in use": sum(len(lane.running) for lane in scheduler.lanes),
            "waiting": len(scheduler.waiting),
            "pages in use": sum(pool.num_pages - pool.available for pool in pools),
        }
        for name, count in counts.items():
            self.events.append(
                {"ph": "C", "pid": HOST, "tid": 0, "name": name, "ts": self._time(now)}
                | {"args": {name: count}}
            )

    def _time(self, at: float) -> float:
        return (at - self._began) * MICROSECONDS


@contextmanager
def written_trace(
    engine: Engine, path: Path, guard: AbstractContextManager[object]
) -> Iterator[None]:
    """Record what the engine does in a block, and write the file when the block ends.

    Args:
        engine: Engine whose steps are recorded.
        path: File, written in any case, and first of all empty, so that errors come before work.
        guard: Context manager in which the engine and the file are touched.

    Raises:
        ConfigError: The file cannot be written.
    """
    with guard:
        _write(path, "")
        trace = StepTrace(engine)
    with trace:
        try:
            yield
        finally:
            with guard:
                _write(path, trace.to_json())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path}: the trace cannot be written: {error.strerror}") from None


def _chunk(plan: StepPlan, lane: LanePlan, at: int, track: int, seq: Sequence | None) -> _Chunk:
    start = lane.starts[at]
    size = lane.sizes[at]
    in_prompt = seq is not None and start < seq.prompt_len and plan.kind != "decode"
    what = f"prompt {start} to {start + size}" if in_prompt else plan.kind
    args = {"position": start, "tokens": size, "sampled": lane.samples[at]}
    return _Chunk(track, f"{_name(seq)}: {what}", args)


def _name(seq: Sequence | None) -> str:
    """Return the request of a sequence, with its choice if it is not the first."""
    if seq is None:
        return "?"
    return f"{seq.request.id}.{seq.index}" if seq.index else seq.request.id


def _metadata(kind: str, group: int, track: int, args: dict[str, str]) -> dict[str, Any]:
    return {"ph": "M", "pid": group, "tid": track, "name": kind, "args": args}
