"""What benchmarks.serving found: a table at the terminal, JSON, Markdown and a picture in files."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.latency import Objective, Spread, Summary
from jaxserve.plan.plot import Chart, Line, picture

COLUMNS = (
    *("server", "rate", "requests/s", "output tok/s", "prompt tok/s", "cached", "TTFT p50", "p99", "TPOT p50", "p99"),
    *("E2E p50", "p99", "in flight", "goodput", "ended OK"),
)


@dataclass(frozen=True)
class Point:
    """One rate on one server. rate: requests/s offered on average; 0 when all came at once, or there was but one.

    capped: requests that were cut to the longest allowed. peak_in_flight: the most requests that ran at a time.
    interrupted: some were not sent, or not waited for. warning: why not to trust it, or nothing.
    """

    server: str
    rate: float
    capped: int
    peak_in_flight: int
    interrupted: bool
    warning: str
    summary: Summary


@dataclass
class Report:
    """account: of machine, software, server and workload. out: where JSON goes after each point, None for nowhere;
    the table and the picture go beside it in the end."""

    account: dict[str, Any]
    objective: Objective
    out: Path | None
    console: Console
    points: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> None:
        self.points.append(point)
        self._show(point)
        self._write()

    def compiled(self, server: str, count: int) -> None:
        """So many steps since the server was ready, after everything was measured: a warning, unless it is 0."""
        if count:
            self.account["servers"][server]["compiles_after_ready"] = count
            self.console.print(f"{server}: {count} compiles since it was ready; some requests waited for them")
            self._write()

    def _write(self) -> None:
        if self.out:
            content = self.account | {"points": [asdict(p) for p in self.points]}
            self.out.write_text(json.dumps(content, indent=1) + "\n")

    def close(self) -> None:
        """The table of all, and the files that can only be written now."""
        if len(self.points) > 1:
            self.console.print(table(self.points))
        if self.out and self.points:
            self.out.with_suffix(".md").write_text(markdown(self.points))
            self.out.with_suffix(".svg").write_text(picture(charts(self.points)))

    def _show(self, point: Point) -> None:
        for line in (_headline(point), *_failures(point.summary), *([point.warning] if point.warning else [])):
            self.console.print(line, soft_wrap=True, markup=False)
        self.console.print(latencies(point.summary))
        for line in _throughput(point.summary, self.objective):
            self.console.print(line, soft_wrap=True, markup=False)


def _headline(point: Point) -> str:
    s = point.summary
    parts = [f"{point.server}: {s.requests} requests {_pace(point)}, {s.ok} OK in {s.busy_seconds:.1f} s"]
    parts += [f"{s.unfinished} unfinished"] if s.unfinished else []
    parts += [f"{point.capped} capped"] if point.capped else []
    parts += [f"at most {point.peak_in_flight} in flight"]
    return ", ".join(parts) + (" (interrupted)" if point.interrupted else "")


def _pace(point: Point) -> str:
    return f"at {point.rate:.3g}/s" if point.rate else "at once"


def _failures(s: Summary) -> Iterator[str]:
    for status, failure in s.failures.items():
        yield f"{failure.count} x {status}: {failure.example}"


def _throughput(s: Summary, objective: Objective) -> Iterator[str]:
    cached = f"{s.cached_prompt_tokens:,} of {s.prompt_tokens:,} prompt tokens cached"
    rates = (s.requests_per_second, s.output_tokens_per_second, s.prompt_tokens_per_second)
    yield "{:.2f} requests/s, {:.1f} output tokens/s, {:.1f} prompt tokens/s, ".format(*rates) + cached
    if s.goodput is not None:
        bounds = [f"{name} {most:g} ms" for name, most in _bounds(objective) if most is not None]
        yield f"goodput {s.goodput:.2f} requests/s, {s.goodput_share or 0:.1%} of requests, within {', '.join(bounds)}"


def _bounds(objective: Objective) -> tuple[tuple[str, float | None], ...]:
    return ("TTFT", objective.ttft_ms), ("TPOT", objective.tpot_ms)


def latencies(s: Summary) -> Table:
    shown = Table("ms", "mean", "p50", "p95", "p99")
    for name in ("ttft", "tpot", "itl", "e2e", "lag"):
        spread: Spread | None = getattr(s, name)
        shown.add_row(name.upper() if name != "lag" else "sent late by", *_figures(spread))
    return shown


def _figures(spread: Spread | None) -> list[str]:
    return [f"{value:.1f}" for value in asdict(spread).values()] if spread else ["-"] * 4


def _cells(point: Point) -> list[str]:
    s = point.summary
    rates = (s.requests_per_second, s.output_tokens_per_second, s.prompt_tokens_per_second)
    spreads = [x for spread in (s.ttft, s.tpot, s.e2e) for x in (_figures(spread)[1], _figures(spread)[3])]
    cached = f"{s.cached_prompt_tokens / s.prompt_tokens:.0%}" if s.prompt_tokens else "-"
    good = "-" if s.goodput is None else f"{s.goodput:.2f} ({s.goodput_share or 0:.0%})"
    ended = f"{s.ok} of {s.requests}" + (" !" if point.warning else "")
    pace = _pace(point).removeprefix("at ").removesuffix("/s")
    return [point.server, pace, *(f"{x:.2f}" for x in rates), cached, *spreads, str(point.peak_in_flight), good, ended]


def table(points: Sequence[Point]) -> Table:
    """The columns that fit a terminal."""
    names = ("server", "rate", "output tok/s", "TTFT p50, p99", "TPOT p50, p99", "goodput", "ended OK")
    shown = Table(*names, title="latencies in ms; !: see its warning", box=SIMPLE_HEAD)
    for point in points:
        server, rate, _, output, _, _, *spreads, _, good, ended = _cells(point)
        shown.add_row(server, rate, output, ", ".join(spreads[:2]), ", ".join(spreads[2:4]), good, ended)
    return shown


def markdown(points: Sequence[Point]) -> str:
    """All columns."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(_cells, points)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def charts(points: Sequence[Point]) -> list[Chart]:
    """TTFT and TPOT against throughput."""
    return [
        Chart(title, "output tokens/s", "ms", _lines(points, name))
        for title, name in (("time to first token", "ttft"), ("time per output token", "tpot"))
    ]


def _lines(points: Sequence[Point], name: str) -> list[Line]:
    """Two for each server, through its rates in their order."""
    lines = []
    for server in dict.fromkeys(point.server for point in points):
        for quantile in ("p50", "p99"):
            places = list(_places([p.summary for p in points if p.server == server], name, quantile))
            lines.append(Line(f"{server} {quantile}", server, places, dashed=quantile == "p99"))
    return lines


def _places(summaries: Sequence[Summary], name: str, quantile: str) -> Iterator[tuple[float, float]]:
    for s in summaries:
        if (spread := getattr(s, name)) and (value := getattr(spread, quantile)) > 0:
            yield s.output_tokens_per_second, value
