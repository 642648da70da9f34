"""Results as Markdown, CSV and JSON: cells in, text out."""

import csv
import io
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
    """A table of ready cells. left: how many of the first columns are names, which begin at their
    left edge.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1


def markdown(grid: Grid) -> str:
    """Columns padded, so that it is a table to the eye too."""
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
    """A header and a line for each row; the columns are those of the first row, nested ones joined
    by an underscore.
    """
    flat = [flattened(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def flattened(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"ttft": {"p50": 1}} becomes {"ttft_p50": 1}; a list of values is joined by spaces."""
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
    """Standard deviation of the samples (n - 1 below the sum); 0 of a single one."""
    return statistics.stdev(samples) if len(samples) > 1 else 0.0


def spread(samples: Sequence[float], digits: int = 2) -> str:
    """Mean ± standard deviation; of a single sample itself, of none a dash."""
    if not samples:
        return "-"
    mean = f"{statistics.fmean(samples):.{digits}f}"
    return mean if len(samples) == 1 else f"{mean} ± {deviation(samples):.{digits}f}"
