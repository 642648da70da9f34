"""Seconds of lowering and compiling until a server of a published model can give an answer.

For chips that are not here; nothing runs on a device, and no compiled step is read from a cache.

    python -m benchmarks.deviceless_start [--model NAME] [--chip NAME ...] [--all] --out FILE.json

In an environment with these compilers (`make deviceless`). A server is ready with the largest step
of each kind and the row writers, which are compiled first, one after the other; a start lowers a
step while it compiles another one, which these sums leave out. With --all the other steps are
compiled too, which are what a server with `--ready-when all` waits for. What is in FILE already is
not compiled again.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.device import versions
from benchmarks.deviceless import CONTEXT, PAGES, fitting
from benchmarks.models import NAMES, spec_of
from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.buckets import Bucket, BucketPlan, by_gain, required
from jaxserve.engine.device.lowering import Lowering, abstract_params
from jaxserve.sharding.aot_devices import ENVIRONMENT, devices
from jaxserve.sharding.chips import CHIPS
from jaxserve.sharding.mesh import MeshSpec

BF16 = jnp.dtype(jnp.bfloat16)

Lower = Callable[[], list[jax.stages.Lowered]]


@dataclass(frozen=True)
class Row:
    """One program, and the seconds that its lowering and its compiling took.

    awaited: whether the first answer waits for it.
    """

    commit: str
    model: str
    chip: str
    tensor: int
    program: str
    awaited: bool
    lowering: float
    compiling: float


def lowering_of(model: str, chip: str, tensor: int) -> Lowering:
    """Return the lowering of a server's programs with the default options."""
    spec = spec_of(model)
    mesh = MeshSpec(tensor=tensor).build(devices(chip, tensor))
    config = resolve(
        EngineOptions(max_context=CONTEXT, page_size=64, cache_tokens=64 * PAGES),
        max_positions=CONTEXT,
        lanes=1,
        affordable_tokens=2**20,
        windows=[group.window for group in spec.page_groups()],
        weights=str(BF16),
    )
    return Lowering(spec, abstract_params(spec, BF16, mesh), config, mesh)


def programs_of(lowering: Lowering) -> list[tuple[str, bool, Lower]]:
    """Return each program in the order of a start: its name, if it is awaited, how to lower it."""
    buckets = BucketPlan.of(lowering.config).buckets
    first = required(buckets)
    others = by_gain([bucket for bucket in buckets if bucket not in first], first)
    steps = [
        (str(bucket), bucket in first, partial(lower_step, lowering, bucket))
        for bucket in (*first, *others)
    ]
    return [("row writers", True, lambda: list(lowering.writers().values())), *steps]


def lower_step(lowering: Lowering, bucket: Bucket) -> list[jax.stages.Lowered]:
    return [lowering.step(bucket)]


def measure(lower: Lower) -> tuple[float, float]:
    """Return the seconds of lowering a program and those of compiling it."""
    began = time.monotonic()
    lowered = lower()
    lowered_at = time.monotonic()
    for each in lowered:
        each.compile()
    return round(lowered_at - began, 1), round(time.monotonic() - lowered_at, 1)


def summary(rows: list[Row]) -> str:
    """Return the seconds of each start as a table."""
    lines = [
        "| commit | model | chip x tensor | programs | lowering, s | lowering and compiling, s |",
        "|---|---|---|---|---|---|",
    ]
    starts = {(row.commit, row.model, row.chip, row.tensor): row for row in rows}
    for start in starts:
        of_start = [row for row in rows if (row.commit, row.model, row.chip, row.tensor) == start]
        commit, model, chip, tensor = start
        for what, counted in (
            ("until the first answer", [row for row in of_start if row.awaited]),
            ("all that were compiled", of_start),
        ):
            lowering = sum(row.lowering for row in counted)
            total = lowering + sum(row.compiling for row in counted)
            lines.append(
                f"| {commit} | {model} | {chip} x {tensor} | {len(counted)}, {what} "
                f"| {lowering:.0f} | {total:.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deviceless_start", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", choices=NAMES, default="llama3.1-8b")
    parser.add_argument(
        "--chip", action="append", choices=list(CHIPS), help="default: h200 and v6e"
    )
    parser.add_argument("--all", action="store_true", help="compile the other steps too")
    parser.add_argument(
        "--out", type=Path, required=True, help="results as JSON; goes on from what is in it"
    )
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    kept = json.loads(args.out.read_text()) if args.out.exists() else []
    rows = [Row(**row) for row in kept]
    commit = versions()["commit"]
    for chip in args.chip or ["h200", "v6e"]:
        tensor = fitting(args.model, chip)
        if tensor is None:
            raise SystemExit(f"{args.model} in bfloat16 does not fit up to 8 devices of {chip}")
        start = (commit, args.model, chip, tensor)
        done = {row.program for row in rows if astuple(row)[: len(start)] == start}
        for program, awaited, lower in programs_of(lowering_of(args.model, chip, tensor)):
            if program not in done and (awaited or args.all):
                rows.append(Row(*start, program, awaited, *measure(lower)))
                args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
                print(rows[-1], flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
