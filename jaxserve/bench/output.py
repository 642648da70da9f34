"""Tables of results as Markdown and CSV."""

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 10_000  # columns: a Markdown table has no line breaks


@dataclass(frozen=True)
class Grid:
    """A table of formatted cells; the first `left` columns are names, which are aligned left."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


def markdown(grid: Grid) -> str:
    """Return the table as Markdown, with padded columns."""
    table = Table(box=MARKDOWN)
    for number, name in enumerate(grid.columns):
        table.add_column(
            Text(name), justify="left" if number < grid.left else "right", no_wrap=True
        )
    for row in grid.rows:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=WIDTH).print(table)
    return "".join(f"{line.strip()}\n" for line in text.getvalue().splitlines() if line.strip())


def comma_separated(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header.

    The columns are those of the first row; names of nested ones are joined by an underscore.
    """
    flat = [flattened(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def as_json(
    benchmark: str, model: Mapping[str, Any], rows: Sequence[Any], found: dict[str, Any]
) -> str:
    """Return results as JSON, with the device of `model` in the environment that was `found`."""
    environment = found | {"device": model["device"]}
    whole = {"environment": environment, "benchmark": benchmark, "model": model, "results": rows}
    return json.dumps(whole, indent=1) + "\n"


def flattened(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a row without nesting: {"ttft": {"p50": 1}} becomes {"ttft_p50": 1}.

    A list of values is joined by spaces.
    """
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}_")
        else:
            flat[prefix + name] = (
                " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            )
    return flat


def deviation(samples: Sequence[float]) -> float:
    """Return the standard deviation of samples (with n - 1); 0 for a single one."""
    return statistics.stdev(samples) if len(samples) > 1 else 0.0


def spread(samples: Sequence[float], digits: int = 2) -> str:
    """Return mean ± standard deviation; a single sample alone, and a dash for none."""
    if not samples:
        return "-"
    mean = f"{statistics.fmean(samples):.{digits}f}"
    return mean if len(samples) == 1 else f"{mean} ± {deviation(samples):.{digits}f}"
