"""bench startup: seconds until the first token, stage by stage.

Every start is a process of its own. A cold start has an empty compilation cache, a cached start
what the cold start before left there. The operating system's cache of files is left as it is, so
weights and modules may come from memory.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from rich.console import Console

from jaxserve.bench.checks import check_above, check_unused
from jaxserve.bench.environment import environment, footnote
from jaxserve.bench.flags import StartupOptions
from jaxserve.bench.output import Grid, as_json, comma_separated, markdown, spread
from jaxserve.bench.own_server import last_line
from jaxserve.bench.stages import STAGES
from jaxserve.errors import ConfigError
from jaxserve.interrupts import interrupts_raise
from jaxserve.progress import Bar

KINDS = ("cold", "cached")


@dataclass(frozen=True)
class Start:
    """One start."""

    kind: str  # cold or cached
    repetition: int
    seconds: dict[str, float]  # of each stage, the first from the start of the process
    model: dict[str, Any]  # see bench.offline.about
    programs: int  # steps and writers of rows that were needed
    compiled: int  # programs that the compilation cache did not have

    @property
    def total(self) -> float:
        """Seconds until the first token."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        row = {"start": self.kind, "repetition": self.repetition, "programs": self.programs}
        return row | {"compiled": self.compiled, "seconds": self.seconds | {"total": self.total}}


def bench_startup(options: StartupOptions) -> int:
    """Measure cold and cached starts and print the results."""
    check_above(options, 0, "repetitions")
    check_unused(
        options,
        ["compilation_cache"],
        "is decided here: an empty folder for each cold start (leave it out)",
    )
    found = environment(options.command_line)
    starts: list[Start] = []
    total = len(KINDS) * options.repetitions
    try:
        with interrupts_raise(), Bar(Console(stderr=True, highlight=False), "starting") as bar:
            for repetition in range(options.repetitions):
                with TemporaryDirectory(prefix="jaxserve-bench-") as folder:
                    flags = [*options.words[1:], "--compilation-cache", folder]
                    for kind in KINDS:
                        bar.update(len(starts), total, kind)
                        starts.append(start(kind, repetition, flags))
            bar.update(total, total, "")
    finally:  # after Ctrl-C too
        if starts:
            print(text(options.output, starts, found), end="")
    return 0


def start(kind: str, repetition: int, flags: Sequence[str]) -> Start:
    """Start a process and wait for its end; ConfigError with its last line if it fails."""
    with TemporaryFile() as log:
        stages: list[tuple[float, dict[str, Any]]] = []
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "jaxserve.bench.stages", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process:
            try:
                assert process.stdout
                stages += [(time.monotonic(), json.loads(line)) for line in process.stdout]
                code = process.wait()
            finally:
                process.kill()
        if code or [line["stage"] for _, line in stages] != list(STAGES):
            raise ConfigError(
                f"the program that was started ended with exit code {code}: {last_line(log)}"
            )
    times = [began, *(at for at, _ in stages)]
    seconds = {
        stage: round(b - a, 4) for stage, (a, b) in zip(STAGES, pairwise(times), strict=True)
    }
    facts = {name: value for _, line in stages for name, value in line.items()}
    return Start(kind, repetition, seconds, facts["model"], facts["programs"], facts["compiled"])


def text(output: str, starts: Sequence[Start], found: dict[str, Any]) -> str:
    """Return the results as md, csv or json."""
    model = starts[0].model
    rows = [start.to_json() for start in starts]
    if output == "json":
        return as_json("startup", model, rows, found)
    if output == "csv":
        shared = {"model": model["model"], "device": model["device"]}
        return comma_separated([shared | row for row in rows])
    size = (
        f"{model['model']}, {model['parameters'] / 1e6:,.1f} M parameters, {model['dtype']}, "
        f"mesh {model['mesh']}"
    )
    return f"{markdown(grid(starts))}\n{size}; {footnote(found, model['device'])}\n"


def grid(starts: Sequence[Start]) -> Grid:
    """Return the table of results, a row for each kind of start."""
    stages = (f"{stage} s" for stage in STAGES)
    columns = ("start", "starts", *stages, "total s", "programs", "compiled")
    return Grid(columns, list(_rows(starts)))


def _rows(starts: Sequence[Start]) -> Iterator[list[str]]:
    for kind in dict.fromkeys(start.kind for start in starts):
        found = [start for start in starts if start.kind == kind]
        stages = (spread([start.seconds[stage] for start in found]) for stage in STAGES)
        total = spread([start.total for start in found])
        last = found[-1]
        yield [kind, str(len(found)), *stages, total, str(last.programs), str(last.compiled)]
