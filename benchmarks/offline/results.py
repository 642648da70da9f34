"""Turns of all sides, and tables of what they gave."""

import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.offline.sides import Rates, Side
from jaxserve.bench.environment import environment

STEADY = 0.10  # of the median, between the least and the most
FIELDS = ("prompts", "decode", "both")
PROCESSOR = Path("/proc/cpuinfo")
EXTENSIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class Result:
    """Tokens per second of one side's turns."""

    program: str
    precision: str
    load: str  # prompts, decode, both or mixed
    streams: int
    rates: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def steady(self) -> bool:
        return max(self.rates) - min(self.rates) <= STEADY * self.median

    def to_json(self) -> dict[str, Any]:
        rates = [round(rate, 2) for rate in self.rates]
        return vars(self) | {"rates": rates, "median": round(self.median, 2)}


def measure_equal(sides: Sequence[Side], streams: int, repeats: int) -> list[Result]:
    """Measure requests of one length: a result for each side and field of Rates."""

    def turns() -> list[Result]:
        found = _in_turns([partial(side.equal, streams) for side in sides], repeats)
        return [
            Result(side.program, side.precision, field, streams, _column(rates, field))
            for field in FIELDS
            for side, rates in zip(sides, found, strict=True)
        ]

    return _steadied(turns)


def measure_mixed(sides: Sequence[Side], streams: int, requests: int, repeats: int) -> list[Result]:
    """Measure requests of mixed lengths, on the sides that run them."""

    def turns() -> list[Result]:
        calls = [partial(side.mixed, streams, requests) for side in sides]
        found = _in_turns(calls, repeats)
        return [
            Result(side.program, side.precision, "mixed", streams, [r for r in rates if r])
            for side, rates in zip(sides, found, strict=True)
            if rates[0] is not None
        ]

    return _steadied(turns)


def _steadied(turns: Callable[[], list[Result]]) -> list[Result]:
    """Return the results, of a second round of turns where one of the first is not steady."""
    found = turns()
    return found if all(result.steady for result in found) else turns()


def _in_turns[T](calls: Sequence[Callable[[], T]], repeats: int) -> list[list[T]]:
    """Make all calls in turns, after a turn that is thrown away; return what each call gave."""
    for call in calls:
        call()
    rounds = [[call() for call in calls] for _ in range(repeats)]
    return [list(column) for column in zip(*rounds, strict=True)]


def _column(rates: Sequence[Rates], field: str) -> list[float]:
    return [getattr(each, field) for each in rates]


# ---- tables


def facts(threads: int) -> dict[str, Any]:
    """Return what the figures depend on: processor, versions, command and load."""
    command = shlex.join(["python", "-m", "benchmarks.offline", *sys.argv[1:]])
    return environment(command) | processor() | {"threads": threads}


def processor() -> dict[str, Any]:
    """Return the processor's name, and those of its extensions that products use."""
    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    flags = fields.get("flags", "").split()
    return {
        "processor": fields.get("model name", "unknown"),
        "extensions": [name for name in EXTENSIONS if name in flags],
    }


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Return the medians as a table: a row for each load and number of streams."""
    sides = list(dict.fromkeys((r.program, r.precision) for r in results))
    cells = {(r.load, r.streams, r.program, r.precision): _cell(r) for r in results}
    lines = [
        f"{about['processor']} ({', '.join(about['extensions'])}), {about['threads']} threads, "
        f"jax {about['jax']}, {about['date']}, load {about['load_before']} before; tokens per "
        f"second, median (least to most); * spread over {STEADY:.0%} twice\n",
        "| load | streams | " + " | ".join(" ".join(side) for side in sides) + " |",
        "|---|---" + "|---" * len(sides) + "|",
    ]
    for load, streams in dict.fromkeys((r.load, r.streams) for r in results):
        row = [cells.get((load, streams, *side), "") for side in sides]
        lines.append(f"| {load} | {streams} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _cell(result: Result) -> str:
    star = "" if result.steady else " *"
    return f"{result.median:.1f} ({min(result.rates):.1f} to {max(result.rates):.1f}){star}"
