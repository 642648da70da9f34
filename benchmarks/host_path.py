"""Time that the host spends on a decode step, in microseconds.

Planning, launching, collecting and committing are measured apart.

    python -m benchmarks.host_path [--rows 1 --rows 64 --rows 256] [--steps 300] [--model NAME]
    [--out FILE]

Without --model there is no device: launching packs the upload and collecting unpacks a made-up
download, as the real runner does, so that what is left out is jax's own dispatch. With one, random
weights of that shape decode on the first device; then collecting waits for it, and beside the mean
wall time of a step stands that of launching one step as many times, from the same lengths on, with
no more host between than packing: the difference is the device's idle time.

Prompts of 100 tokens, pages of 64, every row decoding; the median over the steps, and the mean of
the slowest hundredth: there, all rows fill a page at once and begin another.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.device import about
from benchmarks.models import NAMES, spec_of
from jaxserve.config import EngineConfig, EngineOptions, resolve
from jaxserve.engine.buckets import BucketPlan, choose
from jaxserve.engine.device.batch import download_layout, pack_lane, unpack_lane, upload_layout
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Runner
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.models.decoder import param_specs
from jaxserve.models.spec import ModelSpec
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.sharding.params import random_params

PROMPT_TOKENS = 100
PARTS = ("plan", "launch", "collect", "commit")
T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """Microseconds per step: the median of each part and of all, and the slowest hundredth's mean.

    wall and device, of a model on a device: a step's time in the running engine, and back to back.
    """

    rows: int
    parts: dict[str, float]
    median: float
    slowest: float
    wall: float | None = None
    device: float | None = None

    @property
    def idle(self) -> float | None:
        """Return how long the device waits for the host in each step.

        The errors of both measurements may make it negative.
        """
        return None if self.wall is None or self.device is None else self.wall - self.device


class Clock:
    """Sums of the time that the parts of a step take."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, part: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        done = work()
        self.seconds[part].append(time.perf_counter() - began)
        return done


def config_for(rows: int, steps: int, spec: ModelSpec | None = None) -> EngineConfig:
    """Return a configuration with room for all rows, and for all prompts in one step."""
    longest = PROMPT_TOKENS + steps + 8
    options = EngineOptions(
        max_batch=rows,
        step_tokens=rows * PROMPT_TOKENS,
        max_context=longest,
        page_size=64,
        cache_tokens=rows * -(-longest // 64) * 64,
    )
    windows = [group.window for group in spec.page_groups()] if spec else (None,)
    return resolve(options, max_positions=4096, lanes=1, affordable_tokens=2**40, windows=windows)


class NoDevice:
    """A runner that does the host's half of its work."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self._buckets = BucketPlan.of(config).buckets

    def launch(self, plan: StepPlan) -> np.ndarray:
        bucket = choose(self._buckets, plan.kind, plan.num_rows, plan.num_tokens)
        layout = upload_layout(bucket, 1, self.config.page_size)
        sizes = dict(page_size=self.config.page_size, groups=1, padding_row=self.config.max_batch)
        return np.stack([pack_lane(lane, bucket, layout, **sizes) for lane in plan.lanes])

    def collect(self, plan: StepPlan, handle: np.ndarray) -> StepOutput:
        layout = download_layout(choose(self._buckets, plan.kind, plan.num_rows, plan.num_tokens))
        array = np.ones(layout.size, np.int32)  # of every row one token, id 1, finite
        return StepOutput(tuple(unpack_lane(lane, layout, array) for lane in plan.lanes))

    def close(self) -> None:
        pass


class Loop:
    """An engine in full flight, with its parts timed.

    Every row decodes; one step is in flight while the next is planned.
    """

    def __init__(self, config: EngineConfig, runner: Runner, steps: int):
        self.rows = config.max_batch
        self.runner = runner
        self.scheduler = Scheduler(config)
        for number in range(self.rows):
            sampling = SamplingParams(max_tokens=steps + 3, ignore_eos=True)
            prompt = tuple(
                np.random.default_rng(number).integers(1000, size=PROMPT_TOKENS).tolist()
            )
            self.scheduler.submit(
                Request(id=str(number), prompt=prompt, params=sampling), seed=number
            )
        self._flying = self._launch(Clock())  # the prompts
        self.admissions = self._flying[0].admissions
        self.step(Clock())

    def _launch(self, clock: Clock) -> tuple[StepPlan, Any]:
        plan = clock.time("plan", self.scheduler.plan)
        assert plan is not None and plan.num_rows == self.rows, "not every row is in the step"
        return plan, clock.time("launch", lambda: self.runner.launch(plan))

    def step(self, clock: Clock) -> StepPlan:
        plan, handle = self._flying
        self._flying = self._launch(clock)
        output = clock.time("collect", lambda: self.runner.collect(plan, handle))
        clock.time("commit", lambda: self.scheduler.commit(plan, output))
        return self._flying[0]


def run(loop: Loop, steps: int) -> tuple[Clock, float]:
    """Return the parts' times, and the wall time of a step in seconds."""
    clock = Clock()
    began = time.perf_counter()
    for _ in range(steps):
        loop.step(clock)
    return clock, (time.perf_counter() - began) / steps


def result(
    rows: int, clock: Clock, wall: float | None = None, device: float | None = None
) -> Result:
    micro = {part: [second * 1e6 for second in clock.seconds[part]] for part in PARTS}
    whole = sorted(sum(step) for step in zip(*micro.values(), strict=True))
    medians = {part: round(statistics.median(values), 1) for part, values in micro.items()}
    slowest = statistics.fmean(whole[-max(1, len(whole) // 100) :])
    outside = [None if x is None else round(x * 1e6, 1) for x in (wall, device)]
    return Result(rows, medians, round(statistics.median(whole), 1), round(slowest, 1), *outside)


def measure(rows: int, steps: int) -> Result:
    config = config_for(rows, steps)
    return result(rows, run(Loop(config, NoDevice(config), steps), steps)[0])


def measure_model(spec: ModelSpec, dtype: str, rows: int, steps: int) -> Result:
    """Measure the engine's loop, and then its last plan launched again and again.

    The tokens of the latter come back on the device.
    """
    config = config_for(rows, steps, spec)
    mesh = MeshSpec().build(jax.devices())
    runner = DeviceRunner(
        spec, random_params(param_specs(spec, jnp.dtype(dtype)), mesh), config, mesh
    )
    buckets = runner.buckets.buckets
    runner.warm_up(
        [
            choose(buckets, "prefill", rows, rows * PROMPT_TOKENS),
            choose(buckets, "decode", rows, rows),
        ]
    )
    loop = Loop(config, runner, steps)
    clock, wall = run(loop, steps)
    plan = loop.step(Clock())
    for admission in loop.admissions:
        runner.rows.admit(replace(admission, length=PROMPT_TOKENS))
    runner.wait()
    began = time.perf_counter()
    for _ in range(steps):
        runner.launch(plan)
    runner.wait()
    device = (time.perf_counter() - began) / steps
    runner.close()
    return result(rows, clock, wall, device)


def show(results: list[Result]) -> None:
    title = (
        "microseconds of a decode step; slowest: 1 %; alone: back to back; idle: the "
        "device's wait for the host"
    )
    table = Table("rows", *PARTS, "all", "slowest", "wall", "alone", "idle", title=title)
    for r in results:
        outside = ("-" if x is None else f"{x:.0f}" for x in (r.wall, r.device, r.idle))
        parts = (f"{r.parts[part]:.0f}" for part in PARTS)
        table.add_row(str(r.rows), *parts, f"{r.median:.0f}", f"{r.slowest:.0f}", *outside)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_path", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rows", action="append", type=int, help="default: 1, 64 and 256")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--model", choices=NAMES, help="decode on a device; without it there is none"
    )
    parser.add_argument("--layers", type=int, help="only so many of the model's (default: all)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="write the results as JSON, after every case")
    args = parser.parse_args()
    results: list[Result] = []
    for rows in args.rows or (1, 64, 256):
        if args.model:
            spec = spec_of(args.model, args.layers)
            results.append(measure_model(spec, args.dtype, rows, args.steps))
        else:
            results.append(measure(rows, args.steps))
        if args.out:
            shape = {"model": args.model, "layers": args.layers, "dtype": args.dtype}
            account = about() | shape | {"steps": args.steps}
            args.out.write_text(
                json.dumps(account | {"results": [asdict(r) for r in results]}, indent=1) + "\n"
            )
    show(results)


if __name__ == "__main__":
    main()
