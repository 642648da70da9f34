"""Parts of a grammar without nesting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """A regular expression; a text is one that matches only itself."""

    expression: str


@dataclass(frozen=True)
class Name:
    """Use of a rule or of a terminal."""

    name: str
    line: int


@dataclass(frozen=True)
class Sequel:
    """Parts that follow one another; nothing where there are none."""

    parts: "Sequence[Node]"


@dataclass(frozen=True)
class Choice:
    """Alternatives."""

    options: "Sequence[Node]"


@dataclass(frozen=True)
class Repeated:
    """A part several times; `most` is None without a bound."""

    part: "Node"
    least: int
    most: int | None


type Node = Pattern | Name | Sequel | Choice | Repeated


@dataclass(frozen=True)
class Definition:
    """Rule, or terminal, whose name has capital letters."""

    name: str
    body: Choice
    line: int

    @property
    def is_terminal(self) -> bool:
        """True for a terminal, inside of which nothing is ignored."""
        return self.name.lstrip("_")[:1].isupper()


@dataclass(frozen=True)
class Grammar:
    """Definitions by their names, and what may stand between terminals."""

    definitions: Mapping[str, Definition]
    ignored: Sequence[Choice]
