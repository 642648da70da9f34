"""Results of bench serve as tables, CSV and JSON."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from jaxserve.bench.environment import footnote
from jaxserve.bench.latency import Objective, Spread, Summary
from jaxserve.bench.output import Grid, comma_separated, markdown, spread
from jaxserve.bench.target import Target

LATENCIES = ("ttft", "tpot", "itl", "e2e")
FIGURES = ("mean", "p50", "p90", "p99")  # of a Spread
NO_FIGURES = dict.fromkeys(FIGURES)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Results of one run of one load."""

    load: str
    repetition: int
    # Requests on average; None in a closed loop, or if all came at once.
    offered_per_second: float | None
    concurrency: int | None
    capped: int  # requests that were cut to the longest allowed
    peak_in_flight: int  # the most requests in flight at a time
    interrupted: bool  # some requests were not sent, or not waited for
    warning: str  # why the figures cannot be trusted, or ""
    summary: Summary


@dataclass
class Report:
    """Results of all runs."""

    environment: dict[str, Any]  # see bench.environment
    objective: Objective
    server: Target | None = None  # None until there is one
    compiles_after_ready: int = 0  # compiles that requests have waited for
    background_compiles: int = 0  # compiles beside requests while they were measured
    points: list[Point] = field(default_factory=list)

    def add(self, point: Point, console: Console) -> None:
        """Add the results of a run, and print remarks about them at once."""
        self.points.append(point)
        for line in remarks(point):
            console.print(f"{point.load}: {line}", soft_wrap=True, markup=False)

    def text(self, output: str) -> str:
        """Return the results as md, csv or json."""
        if output == "json":
            return json.dumps(self.to_json(), indent=1) + "\n"
        if output == "csv":
            return comma_separated([row_of(point) for point in self.points])
        tables = (markdown(rates(self.points)), markdown(latencies(self.points)))
        return "\n".join([*tables, *self._below(), ""])

    def to_json(self) -> dict[str, Any]:
        server = self.server
        device = server.device if server else None
        about = server and {"where": server.where, "model": server.model, "about": server.about}
        return {
            "environment": self.environment | {"device": device},
            "benchmark": "serve",
            "server": about,
            "objective_ms": self.objective.bounds(),
            "compiles_after_ready": self.compiles_after_ready,
            "background_compiles": self.background_compiles,
            "results": [asdict(point) for point in self.points],
        }

    def _below(self) -> Iterator[str]:
        """Yield the lines below the tables; two spaces end a line of Markdown."""
        bounds = self.objective.bounds()
        if bounds:
            limits = ", ".join(f"{name} {limit:g} ms" for name, limit in bounds.items())
            yield f"goodput: requests within {limits}  "
        if self.compiles_after_ready:
            yield (
                f"NOT STEADY: {self.compiles_after_ready} compiles while it was measured; "
                f"requests waited for them  "
            )
        if self.background_compiles:
            yield (
                f"NOT STEADY: {self.background_compiles} compiles beside requests while it was "
                f"measured (start the server with --ready-when all)  "
            )
        for point in self.points:
            yield from (f"{point.load}: {line}  " for line in remarks(point))
        if self.server:
            note = footnote(self.environment, self.server.device)
            yield f"{self.server.model} at {self.server.where}; {note}"


def remarks(point: Point) -> Iterator[str]:
    """Yield what a reader has to know about a run beside its row in the tables."""
    s = point.summary
    for status, failure in s.failures.items():
        yield f"{failure.count} x {status}: {failure.example}"
    if point.interrupted:
        yield f"interrupted, {s.unfinished} unfinished"
    if point.capped:
        yield f"{point.capped} requests were cut to the longest allowed"
    if s.shared_out:
        yield (
            f"the server did not say which chunk had how many tokens ({s.shared_out} requests): "
            f"shared out evenly, so ITL is that of chunks"
        )
    if point.warning:
        yield point.warning


def row_of(point: Point) -> dict[str, Any]:
    """Return a row of CSV; columns of a latency without samples are empty."""
    row = asdict(point)
    summary = row.pop("summary")
    failures = " ".join(
        f"{status}:{failure.count}" for status, failure in point.summary.failures.items()
    )
    filled = {name: summary[name] or NO_FIGURES for name in (*LATENCIES, "lag")}
    return row | summary | {"failures": failures} | filled


def rates(points: Sequence[Point]) -> Grid:
    """Return the table of counts and rates, a row for each load."""
    columns = (
        *("load", "sent", "OK", "failed", "requests/s", "output tok/s", "prompt tok/s"),
        *("cached", "in flight", "goodput/s", "good %"),
    )
    return Grid(columns, [_rates(name, found) for name, found in _by_load(points)])


def _rates(name: str, points: Sequence[Point]) -> list[str]:
    """Return a row: counts over all repetitions, and rates as mean and deviation."""
    all_of = [point.summary for point in points]

    def over(figure: Callable[[Summary], float | None], digits: int = 2) -> str:
        return spread([value for s in all_of if (value := figure(s)) is not None], digits)

    failed = sum(failure.count for s in all_of for failure in s.failures.values())
    prompts = sum(s.prompt_tokens for s in all_of)
    cached = sum(s.cached_prompt_tokens for s in all_of)
    return [
        name,
        str(sum(s.requests for s in all_of)),
        str(sum(s.ok for s in all_of)),
        str(failed),
        over(lambda s: s.requests_per_second),
        over(lambda s: s.output_tokens_per_second, 1),
        over(lambda s: s.prompt_tokens_per_second, 1),
        f"{cached / prompts:.0%}" if prompts else "-",
        str(max(point.peak_in_flight for point in points)),
        over(lambda s: s.goodput),
        over(lambda s: None if s.goodput_share is None else 100 * s.goodput_share, 1),
    ]


def latencies(points: Sequence[Point]) -> Grid:
    """Return the table of latencies, a row for each load and latency."""
    rows = []
    for name, found in _by_load(points):
        for latency in LATENCIES:
            spreads: list[Spread | None] = [getattr(point.summary, latency) for point in found]
            samples = [each for each in spreads if each]
            figures = [spread([getattr(s, figure) for s in samples], 1) for figure in FIGURES]
            rows.append([name, latency.upper(), *figures])
    return Grid(("load", "ms", *FIGURES), rows, left=2)


def _by_load(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    """Yield the repetitions of each load, in the order of the loads."""
    for name in dict.fromkeys(point.load for point in points):
        yield name, [point for point in points if point.load == name]
