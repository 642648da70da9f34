"""The table of README.md that says which family was tested on which mesh: written by the run of those tests."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

BEGIN, END = "<!-- support matrix -->", "<!-- end of support matrix -->"
CASE = re.compile(r"test_families_on_meshes\.py::test_tokens_and_log_probabilities\[(.+)-(\d+x\d+x\d+)\]$")


class SupportMatrix:
    """A pytest plugin: collects the outcomes and writes them into the file between its marks."""

    def __init__(self, path: Path):
        self._path = path
        self._outcomes: dict[tuple[str, str], bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and (case := CASE.search(report.nodeid)):
            self._outcomes[case[1], case[2]] = report.passed

    def pytest_sessionfinish(self) -> None:
        text = self._path.read_text()
        before, rest = text.split(BEGIN + "\n")
        self._path.write_text(before + BEGIN + "\n" + table(self._outcomes) + END + rest.split(END)[1])


def table(outcomes: Mapping[tuple[str, str], bool]) -> str:
    """One row for each family, one column for each mesh."""
    families, meshes = dict.fromkeys(family for family, _ in outcomes), dict.fromkeys(mesh for _, mesh in outcomes)
    words = {True: "tested", False: "FAILED", None: "not run"}
    lines = ["| family | " + " | ".join(meshes) + " |", "|---" * (1 + len(meshes)) + "|"]
    lines += [
        f"| {family} | " + " | ".join(words[outcomes.get((family, mesh))] for mesh in meshes) + " |"
        for family in families
    ]
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[tuple[str, str], str]:
    """What the file says of each family and mesh."""
    head, _, *rows = path.read_text().split(BEGIN + "\n")[1].split(END)[0].splitlines()
    meshes = [cell.strip() for cell in head.strip("|").split("|")][1:]
    cells = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    return {(family, mesh): word for family, *words in cells for mesh, word in zip(meshes, words, strict=True)}
