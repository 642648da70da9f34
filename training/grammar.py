"""A notation for seeded text: rules that are drawn anew, and tables whose rows hold for a whole
telling.

There are three kinds of rule, told apart by what ends their first line:

    name:            one of the lines below, drawn anew at every use
    name >           all of the lines below, in order
    a b c =          a table; the first use of a column draws a row, which then holds

Within a line `{name}` uses a rule or a column (`{Name}` with a capital letter), `(x|y)` draws x or
y, and `//` starts a new paragraph. What has to hold together (a person's name and pronouns, the
thing that is lost and its color, a number and its half) is a row of a table; only what may vary
freely is drawn anew.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

ALTERNATIVES: Final = re.compile(r"\(([^()]*)\)")
REFERENCE: Final = re.compile(r"\{(\w+)\}")
PARAGRAPH: Final = re.compile(r"\s*//\s*")
HEADER: Final = re.compile(r"([\w ]+?) ?([:=>])")


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Grammar:
    """Rules by name: the alternatives of a `:` or `>` rule, and for each column of a `=` rule its
    table.
    """

    choices: Mapping[str, tuple[str, ...]]
    tables: Mapping[str, Table]


def read_grammar(name: str) -> Grammar:
    """The grammar in the file of that name beside this module."""
    return parse((Path(__file__).parent / name).read_text(encoding="utf-8"))


def parse(text: str) -> Grammar:
    """Reads the notation in the module's docstring; ValueError names a row that has not its table's
    columns.
    """
    choices: dict[str, tuple[str, ...]] = {}
    tables: dict[str, Table] = {}
    for block in re.split(r"\n+(?=\S)", text.strip()):
        head, *lines = (line.strip() for line in block.splitlines())
        header = HEADER.fullmatch(head)
        if header is None:
            raise ValueError(f"grammar: {head!r} begins no rule; end it with ':', '>' or '='")
        name, mark = header.groups()
        if mark == "=":
            table = parse_table(tuple(name.split()), lines)
            tables |= dict.fromkeys(table.columns, table)
        else:
            choices[name] = tuple(lines) if mark == ":" else (" ".join(lines),)
    return Grammar(MappingProxyType(choices), MappingProxyType(tables))


def parse_table(columns: tuple[str, ...], lines: list[str]) -> Table:
    rows = tuple(tuple(line.split(" ; ")) for line in lines)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(
                f"grammar: row {row} has {len(row)} cells; its table has the columns {columns}"
            )
    return Table(columns, rows)


@dataclass(frozen=True)
class Telling:
    """One text being written: the rows drawn so far hold until its end."""

    grammar: Grammar
    rng: random.Random
    drawn: dict[str, str] = field(default_factory=dict)

    def text(self, template: str) -> str:
        """The template expanded, its paragraphs separated by one newline."""
        return PARAGRAPH.sub("\n", self.expand(template)).strip()

    def pair(self, rule: str) -> tuple[str, str]:
        """A question and its answer, from a rule whose lines are `question => answer`."""
        question, answer = self.text(f"{{{rule}}}").split(" => ")
        return question, answer

    def expand(self, template: str) -> str:
        """The text of a template; KeyError for a name the grammar does not have."""
        while "(" in template:
            template = ALTERNATIVES.sub(
                lambda match: self.rng.choice(match[1].split("|")), template
            )
        return REFERENCE.sub(lambda match: self.value(match[1]), template)

    def value(self, name: str) -> str:
        key = name[0].lower() + name[1:]
        text = self.column(key) if key in self.grammar.tables else self.choice(key)
        return text if key == name else text[0].upper() + text[1:]

    def choice(self, name: str) -> str:
        return self.expand(self.rng.choice(self.grammar.choices[name]))

    def column(self, name: str) -> str:
        if name not in self.drawn:
            table = self.grammar.tables[name]
            row = self.rng.choice(table.rows)
            self.drawn.update(
                (column, self.expand(cell)) for column, cell in zip(table.columns, row, strict=True)
            )
        return self.drawn[name]
