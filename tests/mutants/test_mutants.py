"""The table of mutants still fits the sources and the tests that it names."""

import ast
import shlex
from collections import Counter
from pathlib import Path

from tests.mutants.table import AREAS, problems, read_mutants

ROOT = Path(__file__).parents[2]


def test_the_table_of_mutants_fits_the_sources() -> None:
    mutants = read_mutants()
    assert problems(mutants) == []
    assert len(mutants) >= 40
    by_area = Counter(mutant.area for mutant in mutants)
    assert {area: by_area[area] for area in AREAS if by_area[area] < 4} == {}


def test_the_tests_that_catch_mutants_are_there() -> None:
    mutants = read_mutants()
    named = [test for mutant in mutants for test in shlex.split(mutant.caught_by)]
    assert [test for test in named if not is_there(test)] == []


def is_there(test: str) -> bool:
    """Return whether the file of a node id defines its function."""
    file, _, function = test.partition("::")
    names = ast.walk(ast.parse((ROOT / file).read_text()))
    wanted = function.partition("[")[0]
    return not wanted or wanted in {getattr(node, "name", None) for node in names}
