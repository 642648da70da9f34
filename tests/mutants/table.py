"""The table of mutants: faults of one line each, and where in the sources they go."""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
AREAS = (
    "kernels",
    "loading",
    "pages",
    "parsers",
    "prefix_cache",
    "sampler",
    "scheduler",
    "server",
    "transfers",
)


@dataclass(frozen=True)
class Mutant:
    """One fault. old: text that the file has once, and `new` takes its place.

    effect: what a user would see of it. caught_by: tests that fail with it, as a shell would split
    them.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    effect: str
    caught_by: str

    def applied(self, text: str) -> str:
        """The file's text with the fault in it."""
        return text.replace(self.old, self.new, 1)


def read_mutants(table: Path = TABLE) -> list[Mutant]:
    """All of them, in the order of the table."""
    return [Mutant(**entry) for entry in tomllib.loads(table.read_text("utf-8"))["mutant"]]


def problems(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """What is wrong with the table, in a line each: nothing where it fits the sources."""
    found = [f"{name}: is there {n} times" for name, n in _names(mutants).items() if n > 1]
    areas = [mutant.area for mutant in mutants]
    if areas != sorted(areas):
        found.append("the table is not sorted by area")
    found += [f"{mutant.name}: {problem}" for mutant in mutants for problem in _of(mutant, root)]
    return found


def _names(mutants: Sequence[Mutant]) -> Counter[str]:
    return Counter(mutant.name for mutant in mutants)


def _of(mutant: Mutant, root: Path) -> Iterator[str]:
    """Problems of one entry."""
    for name in [f.name for f in fields(mutant) if f.name != "new"]:
        if not getattr(mutant, name):
            yield f"{name} is empty"
    if mutant.area not in AREAS:
        yield f"area {mutant.area!r} is none of {', '.join(AREAS)}"
    if mutant.old == mutant.new:
        yield "new is the same as old"
    path = root / mutant.file
    if not path.is_file():
        yield f"there is no file {mutant.file}"
        return
    text = path.read_text("utf-8")
    if (count := text.count(mutant.old)) != 1:
        yield f"{mutant.file} has the text {count} times, not once: {mutant.old}"
    elif not _is_python(mutant.applied(text)):
        yield f"{mutant.file} with the fault in it is no Python"


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
