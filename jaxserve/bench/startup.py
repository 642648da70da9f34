"""bench startup: seconds until the first token, stage by stage, of an LLM and of servers.

Every start is a process of its own. A cold start has an empty compilation cache, a cached start
what the cold start before left there. The operating system's cache of files is left as it is, so
weights and modules may come from memory. An LLM compiles every step before its first token; a
server is timed under both values of --ready-when.
"""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from rich.console import Console

from jaxserve.bench.checks import check_above, check_unused
from jaxserve.bench.environment import environment, footnote
from jaxserve.bench.flags import StartupOptions
from jaxserve.bench.output import Grid, as_json, comma_separated, markdown, spread
from jaxserve.bench.own_server import last_line
from jaxserve.bench.served_start import seconds_of_start
from jaxserve.bench.stages import STAGES
from jaxserve.errors import ConfigError
from jaxserve.interrupts import interrupts_raise
from jaxserve.progress import Bar

KINDS = ("cold", "cached")
LLM = "LLM"
SERVERS = {"first": "serve, ready when first", "all": "serve, ready when all"}
PROGRAMS = (LLM, *SERVERS.values())
COLUMNS = (*STAGES[:-1], "ready", STAGES[-1])  # stages of all programs


@dataclass(frozen=True)
class Start:
    """One start."""

    program: str  # one of PROGRAMS
    kind: str  # cold or cached
    repetition: int
    seconds: dict[str, float]  # of each stage, the first from the start of the process
    model: dict[str, Any] | None = None  # of an LLM, see bench.offline.about
    programs: int | None = None  # steps and writers of rows that an LLM needed
    compiled: int | None = None  # programs that the compilation cache did not have for it

    @property
    def total(self) -> float:
        """Seconds until the first token."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        seconds = {stage: self.seconds.get(stage) for stage in COLUMNS} | {"total": self.total}
        row: dict[str, Any] = {"program": self.program, "start": self.kind}
        row |= {"repetition": self.repetition, "programs": self.programs}
        return row | {"compiled": self.compiled, "seconds": seconds}


def bench_startup(options: StartupOptions) -> int:
    """Measure cold and cached starts and print the results."""
    found = environment(options.command_line)
    starts: list[Start] = []
    asked = list(product(range(options.repetitions), PROGRAMS))
    total = len(KINDS) * len(asked)
    try:
        with interrupts_raise(), Bar(Console(stderr=True, highlight=False), "starting") as bar:
            for repetition, program in asked:
                with TemporaryDirectory(prefix="jaxserve-bench-") as folder:
                    for kind in KINDS:
                        bar.update(len(starts), total, f"{program}, {kind}")
                        starts.append(start(program, kind, repetition, options.words[1:], folder))
            bar.update(total, total, "")
    finally:  # after Ctrl-C too
        if starts:
            print(text(options.output, starts, found), end="")
    return 0


def check_startup(options: StartupOptions) -> None:
    """Raise ConfigError for flags of which nothing can be measured."""
    check_above(options, 0, "repetitions")
    names = ["compilation_cache"]
    why = "is decided here: an empty folder for each cold start (leave it out)"
    check_unused(options, names, why)


def start(program: str, kind: str, repetition: int, words: Sequence[str], folder: str) -> Start:
    """Start a process and wait for its end; ConfigError with its last line if it fails.

    Args:
        words: Flags of bench startup.
        folder: Compilation cache.
    """
    cache = ["--compilation-cache", folder]
    if program == LLM:
        return start_llm(kind, repetition, [*words, *cache])
    (ready_when,) = (value for value, name in SERVERS.items() if name == program)
    flags = [*without_bench_flags(words), *cache, "--ready-when", ready_when]
    return Start(program, kind, repetition, seconds_of_start(flags, leaves_all=kind == "cold"))


def without_bench_flags(words: Sequence[str]) -> list[str]:
    """Return flags of bench startup without those that serve does not have."""
    parser = ArgumentParser(add_help=False)
    for name in ("--repetitions", "--output"):
        parser.add_argument(name)
    _, others = parser.parse_known_args(words)
    return others


def start_llm(kind: str, repetition: int, flags: Sequence[str]) -> Start:
    """Start a process that makes an LLM, and wait for its end; see `start`."""
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
    about = facts["model"], facts["programs"], facts["compiled"]
    return Start(LLM, kind, repetition, seconds, *about)


def text(output: str, starts: Sequence[Start], found: dict[str, Any]) -> str:
    """Return the results as md, csv or json."""
    model = starts[0].model
    assert model, "an LLM is started first"
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
    """Return the table of results, a row for each kind of start of each program."""
    stages = (f"{stage} s" for stage in COLUMNS)
    columns = ("program", "start", "starts", *stages, "total s", "programs", "compiled")
    return Grid(columns, list(_rows(starts)), left=2)


def _rows(starts: Sequence[Start]) -> Iterator[list[str]]:
    for program, kind in dict.fromkeys((start.program, start.kind) for start in starts):
        found = [start for start in starts if (start.program, start.kind) == (program, kind)]
        stages = (_spread(found, stage) for stage in COLUMNS)
        total = spread([start.total for start in found])
        last = found[-1]
        counts = ("" if count is None else str(count) for count in (last.programs, last.compiled))
        yield [program, kind, str(len(found)), *stages, total, *counts]


def _spread(starts: Sequence[Start], stage: str) -> str:
    """Return mean and deviation of a stage, and nothing for programs that do not tell it."""
    found = [start.seconds[stage] for start in starts if stage in start.seconds]
    return spread(found) if found else ""
