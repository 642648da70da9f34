"""What does the host spend on a step? Microseconds of planning, packing, unpacking and committing a decode step.

    python -m benchmarks.host_path [--rows 1 --rows 64 --rows 256] [--steps 300] [--out FILE]

A scheduler drives a runner without a device: it packs every upload and unpacks a made-up download, as the real one
does, so that what is left out is jax's own dispatch. Prompts of 100 tokens, pages of 64, every row decoding; the median
over the steps, and the mean of the slowest hundredth: there, all rows fill a page at once and begin another.
"""

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.config import EngineConfig, EngineOptions, resolve
from jaxserve.engine.batch import download_layout, pack_lane, unpack_lane, upload_layout
from jaxserve.engine.buckets import BucketPlan, choose
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.engine.scheduler import Scheduler
from jaxserve.request import Request, SamplingParams

PROMPT_TOKENS = 100
PARTS = ("plan", "pack", "unpack", "commit")
T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """Microseconds per step: the median of each part and of all, and the mean of the slowest hundredth of all."""

    rows: int
    parts: dict[str, float]
    median: float
    slowest: float


class Clock:
    """Adds up what the parts of a step take."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, part: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        done = work()
        self.seconds[part].append(time.perf_counter() - began)
        return done


def config_for(rows: int, steps: int) -> EngineConfig:
    """Room for everybody, and for all prompts in one step."""
    tokens = rows * (PROMPT_TOKENS + steps + 128)
    options = EngineOptions(max_batch=rows, step_tokens=rows * PROMPT_TOKENS, cache_tokens=tokens)
    return resolve(options, max_positions=4096, lanes=1, affordable_tokens=tokens)


class Host:
    """The host's half of an engine in full flight: every row decodes."""

    def __init__(self, rows: int, steps: int):
        self.config = config_for(rows, steps)
        self.scheduler = Scheduler(self.config)
        self._buckets = BucketPlan.of(self.config).buckets
        for number in range(rows):
            sampling = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
            prompt = tuple(np.random.default_rng(number).integers(1000, size=PROMPT_TOKENS).tolist())
            self.scheduler.submit(Request(id=str(number), prompt=prompt, params=sampling), seed=number)
        self.step(Clock())  # the prompts

    def step(self, clock: Clock) -> None:
        plan = clock.time("plan", self.scheduler.plan)
        assert plan is not None and plan.num_rows == self.config.max_batch, "not every row is in the step"
        clock.time("pack", lambda: self._pack(plan))
        output = clock.time("unpack", lambda: self._unpack(plan))
        clock.time("commit", lambda: self.scheduler.commit(plan, output))

    def _pack(self, plan: StepPlan) -> np.ndarray:
        bucket = choose(self._buckets, plan.kind, plan.num_rows, plan.num_tokens)
        layout = upload_layout(bucket, 1, self.config.page_size)
        sizes = dict(page_size=self.config.page_size, page_groups=1, no_row=self.config.max_batch)
        return np.stack([pack_lane(lane, bucket, layout, **sizes) for lane in plan.lanes])

    def _unpack(self, plan: StepPlan) -> StepOutput:
        layout = download_layout(choose(self._buckets, plan.kind, plan.num_rows, plan.num_tokens))
        array = np.ones(layout.size, np.int32)  # of every row one token, id 1, finite
        return StepOutput(tuple(unpack_lane(lane, layout, array) for lane in plan.lanes))


def measure(rows: int, steps: int) -> Result:
    host, clock = Host(rows, steps), Clock()
    for _ in range(steps):
        host.step(clock)
    micro = {part: [second * 1e6 for second in clock.seconds[part]] for part in PARTS}
    whole = sorted(sum(step) for step in zip(*micro.values(), strict=True))
    medians = {part: round(statistics.median(values), 1) for part, values in micro.items()}
    return Result(rows, medians, round(statistics.median(whole), 1), round(statistics.fmean(whole[-steps // 100 :]), 1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_path", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", action="append", type=int, help="default: 1, 64 and 256")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    results = [measure(rows, args.steps) for rows in args.rows or (1, 64, 256)]
    table = Table("rows", *PARTS, "all", "slowest 1 %", title="microseconds per decode step on the host")
    for r in results:
        table.add_row(str(r.rows), *(f"{r.parts[part]:.0f}" for part in PARTS), f"{r.median:.0f}", f"{r.slowest:.0f}")
    Console().print(table)
    if args.out:
        about = {"python": platform.python_version(), "machine": platform.machine(), "steps": args.steps}
        args.out.write_text(json.dumps(about | {"results": [asdict(r) for r in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
