"""Report of the results: a table with verdicts, JSON, and charts."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.disaggregation.handovers import Handovers
from benchmarks.disaggregation.measuring import Result
from benchmarks.disaggregation.verdicts import verdicts
from jaxserve.bench.latency import Spread
from jaxserve.plan.plot import Chart, Line, picture

LATENCIES = (
    "ITL p50",
    "p99",
    "longest gap p50",
    "p99",
    "TTFT p50",
    "p99",
    "long TTFT p50",
    "p99",
)
HANDOVERS = ("travelled", "failed", "MiB", "s")
COLUMNS = ("long/s", "", *LATENCIES, "tokens/s", "errors", *HANDOVERS)


def show(results: Sequence[Result], console: Console) -> None:
    """Print the table, and a verdict for each rate."""
    table = Table(*COLUMNS, title="milliseconds at the client")
    for result in results:
        table.add_row(*cells(result))
    console.print(table)
    for line in verdicts(results):
        console.print(line)


def cells(result: Result) -> Iterator[str]:
    """Yield the cells of a row of the table."""
    yield from (f"{result.rate:g}", result.arrangement)
    for spread in (result.short.itl, result.gaps, result.short.ttft, result.long.ttft):
        yield from quantile_cells(spread)
    yield f"{result.all.output_tokens_per_second:.0f}"
    yield str(result.all.requests - result.all.ok)
    yield from handover_cells(result.handovers)


def quantile_cells(spread: Spread | None) -> tuple[str, str]:
    """Return p50 and p99 in milliseconds as texts; empty without samples."""
    return (f"{spread.p50:.1f}", f"{spread.p99:.1f}") if spread else ("", "")


def handover_cells(handovers: Handovers | None) -> tuple[str, str, str, str]:
    """Return prompts that travelled, failures, MiB and seconds as texts; empty if not measured."""
    if not handovers:
        return "", "", "", ""
    return (
        str(handovers.decisions.get("remote", 0)),
        str(sum(handovers.failures.values())),
        f"{handovers.mebibytes:.1f}",
        "" if handovers.seconds is None else f"{handovers.seconds:.2f}",
    )


def charts(results: Sequence[Result]) -> list[Chart]:
    """Return charts of p99 and p50 against the rate of long prompts."""

    def lines(of: Callable[[Result], Spread | None]) -> Iterator[Line]:
        for name in dict.fromkeys(r.arrangement for r in results):
            spreads = [
                (r.rate, spread) for r in results if r.arrangement == name and (spread := of(r))
            ]
            yield Line(f"{name} p99", name, [(rate, spread.p99) for rate, spread in spreads])
            yield Line(
                f"{name} p50", name, [(rate, spread.p50) for rate, spread in spreads], dashed=True
            )

    def chart(title: str, of: Callable[[Result], Spread | None]) -> Chart:
        return Chart(title, "long prompts/s", "ms", list(lines(of)))

    return [
        chart("inter-token latency of short streams", lambda r: r.short.itl),
        chart("longest gap of a short stream", lambda r: r.gaps),
        chart("time to first token of long prompts", lambda r: r.long.ttft),
    ]


def to_json(results: Sequence[Result], facts: dict[str, Any]) -> str:
    """Return facts of the run and results, as JSON that ends with a newline."""
    return json.dumps({**facts, "results": [asdict(r) for r in results]}, indent=1) + "\n"


def write(path: Path, results: Sequence[Result], facts: dict[str, Any]) -> None:
    """Write JSON to the path, and charts beside it as .svg."""
    path.write_text(to_json(results, facts))
    path.with_suffix(".svg").write_text(picture(charts(results)))
