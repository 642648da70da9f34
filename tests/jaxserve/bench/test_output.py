"""Tables as Markdown, CSV and numbers with their spread."""

import csv
import io
import statistics

import pytest

from jaxserve.bench.environment import environment, footnote
from jaxserve.bench.output import Grid, comma_separated, deviation, flattened, markdown, spread


def test_markdown_is_a_table_whatever_stands_in_it() -> None:
    """One line a row, as long as it may be; no markup is taken for a colour."""
    grid = Grid(("name", "value"), [["[bold]x[/bold]", "1"], ["y" * 400, "22.5"]])
    lines = markdown(grid).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["name", "value"] and cells[2:] == [
        ["[bold]x[/bold]", "1"],
        ["y" * 400, "22.5"],
    ]
    assert set(lines[1]) == {"|", "-"}
    assert lines[2].endswith("    1 |")  # numbers end at the right


def test_csv_is_read_back() -> None:
    rows = [
        {"a": "x,y", "b": {"p50": 1.5, "p99": None}, "c": [1, 2]},
        {"a": 'q"', "b": {"p50": 2, "p99": 3}, "c": []},
    ]
    read = list(csv.DictReader(io.StringIO(comma_separated(rows))))
    assert read == [
        {"a": "x,y", "b_p50": "1.5", "b_p99": "", "c": "1 2"},
        {"a": 'q"', "b_p50": "2", "b_p99": "3", "c": ""},
    ]
    assert flattened({"a": {"b": {"c": 1}}}) == {"a_b_c": 1}


def test_mean_and_deviation() -> None:
    samples = [1.0, 2.0, 4.0]
    assert spread(samples) == f"{7 / 3:.2f} ± {statistics.stdev(samples):.2f}"
    assert (spread([1.25], 1), spread([]), deviation([5.0])) == ("1.2", "-", 0.0)


@pytest.mark.parametrize(("load", "busy"), [(0.1, False), (1.9, True)])
def test_a_busy_machine_is_marked(monkeypatch: pytest.MonkeyPatch, load: float, busy: bool) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 9.0, 9.0))
    found = environment("jaxserve bench serve --rate 1")
    assert found["command"].endswith("--rate 1") and found["load_before"] == load
    assert {"jaxserve", "jax", "jaxlib", "python", "platform", "date", "cores"} <= found.keys()
    assert ("NOT IDLE" in footnote(found, "cpu")) == busy
