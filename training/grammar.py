"""A notation for random text: rules that are drawn anew at each use, and tables of fixed rows.

There are three kinds of rule, distinguished by the end of their first line:

    name:            one of the lines below, drawn anew at every use
    name >           all of the lines below, in order
    a b c =          a table; the first use of a column draws a row, which is kept for the text

Within a line `{name}` uses a rule or a column (`{Name}` with a capital letter), `(x|y)` draws x or
y, and `//` starts a new paragraph. Words that belong together (a person's name and pronouns, the
lost thing and its color, a number and its half) are a row of a table; words that may vary freely
are drawn anew.
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
    """A table whose row is drawn once for a text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Grammar:
    """Rules by name.

    choices: the alternatives of `:` and `>` rules. tables: the table of each column of `=` rules.
    """

    choices: Mapping[str, tuple[str, ...]]
    tables: Mapping[str, Table]


def read_grammar(name: str) -> Grammar:
    """Read the grammar in a file beside this module."""
    return parse((Path(__file__).parent / name).read_text(encoding="utf-8"))


def parse(text: str) -> Grammar:
    """Parse the notation in the module's docstring; ValueError names a line that is wrong."""
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
    """Parse rows of cells separated by " ; "; ValueError names a row of another length."""
    rows = tuple(tuple(line.split(" ; ")) for line in lines)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(
                f"grammar: row {row} has {len(row)} cells; its table has the columns {columns}"
            )
    return Table(columns, rows)


@dataclass(frozen=True)
class Telling:
    """A text that is being written.

    drawn: the cells of the rows drawn so far, by column, which are kept until the end of the text.
    """

    grammar: Grammar
    rng: random.Random
    drawn: dict[str, str] = field(default_factory=dict)

    def text(self, template: str) -> str:
        """Expand a template, with one newline between paragraphs."""
        return PARAGRAPH.sub("\n", self.expand(template)).strip()

    def pair(self, rule: str) -> tuple[str, str]:
        """Write a question and its answer by a rule whose lines are `question => answer`."""
        question, answer = self.text(f"{{{rule}}}").split(" => ")
        return question, answer

    def expand(self, template: str) -> str:
        """Expand a template; KeyError for a name that the grammar does not have."""
        while "(" in template:
            template = ALTERNATIVES.sub(
                lambda match: self.rng.choice(match[1].split("|")), template
            )
        return REFERENCE.sub(lambda match: self.value(match[1]), template)

    def value(self, name: str) -> str:
        """Return the text of a rule or column, with a capital letter if the name has one."""
        key = name[0].lower() + name[1:]
        text = self.column(key) if key in self.grammar.tables else self.choice(key)
        return text if key == name else text[0].upper() + text[1:]

    def choice(self, name: str) -> str:
        """Draw one of a rule's alternatives and expand it."""
        return self.expand(self.rng.choice(self.grammar.choices[name]))

    def column(self, name: str) -> str:
        """Return the cell of a column, and draw the table's row at the first use."""
        if name not in self.drawn:
            table = self.grammar.tables[name]
            row = self.rng.choice(table.rows)
            self.drawn.update(
                (column, self.expand(cell)) for column, cell in zip(table.columns, row, strict=True)
            )
        return self.drawn[name]
