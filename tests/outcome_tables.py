"""Tables of documents that say what was tested with what: written by the run of those tests."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

WORDS = {True: "tested", False: "FAILED"}
type Cells = Mapping[tuple[str, str], str]  # by row and column


@dataclass(frozen=True)
class Place:
    """Between two marks of a document stands the table of a test, whose ids name row and column.

    refused: why a pair is no case of the test.
    """

    title: str  # of the first column
    begin: str
    end: str
    case: re.Pattern[str]
    refused: Cells = field(default_factory=dict)


FAMILIES_ON_MESHES = Place(
    "family",
    "<!-- support matrix -->",
    "<!-- end of support matrix -->",
    re.compile(
        r"test_families_on_meshes\.py::test_tokens_and_log_probabilities\[(.+)-(\d+x\d+x\d+)\]$"
    ),
)
FEATURE_PAIRS = Place(
    "",
    "<!-- feature pairs -->",
    "<!-- end of feature pairs -->",
    re.compile(r"test_feature_pairs\.py::test_a_pair\[(.+) \+ (.+)\]$"),
    {
        ("drafts of the host", "draft model"): "refused: one drafter at a time",
    },
)


@dataclass
class OutcomeTable:
    """A pytest plugin: collects the outcomes and writes them into the file."""

    path: Path
    place: Place
    _outcomes: dict[tuple[str, str], str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and (case := self.place.case.search(report.nodeid)):
            self._outcomes[case[1], case[2]] = WORDS[report.passed]

    def pytest_sessionfinish(self) -> None:
        text = self.path.read_text()
        before, rest = text.split(self.place.begin + "\n")
        found = table(self.place.title, {**self.place.refused, **self._outcomes})
        self.path.write_text(
            before
            + self.place.begin
            + "\n"
            + found
            + self.place.end
            + rest.split(self.place.end)[1]
        )


def table(title: str, cells: Cells) -> str:
    """A line for each row, a column for each column. Of pairs of the same things half of the cells
    are empty.
    """
    rows, columns = (
        dict.fromkeys(row for row, _ in cells),
        dict.fromkeys(column for _, column in cells),
    )
    missing = "" if rows.keys() & columns.keys() else "not run"
    lines = [f"| {title} | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    lines += [
        f"| {row} | " + " | ".join(cells.get((row, column), missing) for column in columns) + " |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def read(path: Path, place: Place) -> dict[tuple[str, str], str]:
    """What the file says of each row and column; nothing of empty cells."""
    head, _, *rows = path.read_text().split(place.begin + "\n")[1].split(place.end)[0].splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")][1:]
    cells = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    found = {
        (row, column): word
        for row, *words in cells
        for column, word in zip(columns, words, strict=True)
    }
    return {pair: word for pair, word in found.items() if word}
