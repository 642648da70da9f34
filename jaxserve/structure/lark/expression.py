"""Regular expressions that are equal to grammars.

A grammar's language is regular where no rule needs itself but at an end of its own text, as lists
do: such a rule is a repetition. A parser of the library that follows a grammar inside of JSON texts
is not to be had: its lexer would have to look beyond the backslash of an escape to know whether a
terminal ends there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from jaxserve.structure.lark.errors import LarkError
from jaxserve.structure.lark.nodes import (
    Choice,
    Definition,
    Grammar,
    Name,
    Node,
    Pattern,
    Repeated,
    Sequel,
)
from jaxserve.structure.lark.parser import parse

START: Final = "start"
MAX_DEPTH: Final = 150  # parts inside of each other: of rules that use rules, and of groups


def expression_of(grammar: str, max_bytes: int) -> str:
    """Return the regular expression of the texts that a grammar allows, as a whole.

    Args:
        grammar: Grammar in llguidance's dialect of Lark.
        max_bytes: Most bytes of the expression, in UTF-8.

    Returns:
        Expression without anchors. It knows no longest terminals: a text is allowed if there is any
        way to divide it into terminals. What the grammar ignores may stand before each of them.

    Raises:
        LarkError: The grammar is malformed, or not regular, or has something that a regular
            expression has no sign for, or the expression is longer than `max_bytes`.
    """
    return _Writer(parse(grammar), max_bytes).all()


@dataclass
class _Writer:
    """Writes the expression of one grammar."""

    grammar: Grammar
    max_bytes: int
    written: dict[str, str] = field(default_factory=dict)  # by name of the definition
    open_ones: list[str] = field(default_factory=list)  # definitions that are being written
    ignored: str = ""
    depth: int = 0  # of the part that is being written

    def all(self) -> str:
        """Return the expression of the whole grammar."""
        self.ignored = self._of_ignored()
        return self._of(Name(START, 1), in_terminal=False)

    def _of_ignored(self) -> str:
        ignored = self.grammar.ignored
        return f"(?:{self._joined(ignored, '|', in_terminal=True)})*" if ignored else ""

    def _of(self, node: Node, in_terminal: bool) -> str:
        """Return the expression of a part, which a count may follow or another part."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            line = self.grammar.definitions[self.open_ones[-1]].line if self.open_ones else 1
            problem = f"rules and groups are more than {MAX_DEPTH} parts deep inside of each other"
            raise LarkError(line, problem)
        found = self._of_node(node, in_terminal)
        self.depth -= 1
        return found

    def _of_node(self, node: Node, in_terminal: bool) -> str:
        match node:
            case Pattern(expression):
                before = "" if in_terminal else self.ignored
                return f"(?:{before}{expression})"
            case Name():
                return self._of_name(node, in_terminal)
            case Sequel(parts):
                return self._joined(parts, "", in_terminal)
            case Choice(options):
                return self._joined(options, "|", in_terminal)
            case Repeated(part, least, most):
                count = f"{{{least},{'' if most is None else most}}}"
                return f"(?:{self._of(part, in_terminal)}{count})"

    def _joined(self, parts: Sequence[Node], between: str, in_terminal: bool) -> str:
        """Return the expression of several parts; the length is checked before they are joined."""
        found: list[str] = []
        size = 0
        for part in parts:
            found.append(self._of(part, in_terminal))
            size += len(found[-1].encode())
            if size > self.max_bytes:
                self._refuse_length()
        return found[0] if len(found) == 1 else f"(?:{between.join(found)})"

    def _of_name(self, use: Name, in_terminal: bool) -> str:
        definition = self.grammar.definitions.get(use.name)
        if definition is None:
            raise LarkError(use.line, f"{use.name!r:.80} is not defined")
        if in_terminal and not definition.is_terminal:
            raise LarkError(use.line, f"the rule {use.name!r:.80} is used in a terminal")
        if use.name in self.open_ones:
            raise LarkError(
                use.line,
                f"{use.name!r:.80} is used inside of itself: such a grammar cannot be followed "
                "inside of a call, where only regular ones can",
            )
        if use.name not in self.written:
            self.written[use.name] = self._of_definition(definition)
        if in_terminal or not definition.is_terminal:
            return self.written[use.name]
        return f"(?:{self.ignored}{self.written[use.name]})"

    def _of_definition(self, definition: Definition) -> str:
        self.open_ones.append(definition.name)
        found = self._of(_without_itself(definition), definition.is_terminal)
        self.open_ones.pop()
        if len(found.encode()) > self.max_bytes:
            self._refuse_length()
        return found

    def _refuse_length(self) -> None:
        problem = f"the grammar takes more than {self.max_bytes} bytes as a regular expression"
        raise LarkError(1, f"{problem}; --max-grammar-bytes bounds those of a request")


def _without_itself(definition: Definition) -> Node:
    """Return the body of a definition that uses itself at the ends of its alternatives only.

    With the alternatives `name after`, `before name` and `name between name` it is a list of units
    with `between` between them, each a base with any number of `before` and `after`.
    """
    name = definition.name
    bases: list[Node] = []
    before: list[Node] = []
    after: list[Node] = []
    between: list[Node] = []
    for option in definition.body.options:
        parts = list(option.parts) if isinstance(option, Sequel) else [option]
        begins = _is(parts[:1], name)
        ends = len(parts) > 1 and _is(parts[-1:], name)
        if begins and ends:
            between.append(Sequel(parts[1:-1]))
        elif begins and len(parts) > 1:
            after.append(Sequel(parts[1:]))
        elif ends:
            before.append(Sequel(parts[:-1]))
        elif not begins:
            bases.append(option)
    if len(bases) == len(definition.body.options):
        return definition.body
    if not bases:
        raise LarkError(definition.line, f"{name!r:.80} never ends: it always needs itself")
    unit = Sequel([_any_of(before), Choice(bases), _any_of(after)])
    return Sequel([unit, Repeated(Sequel([Choice(between), unit]), 0, None)]) if between else unit


def _any_of(options: Sequence[Node]) -> Node:
    """Return any number of alternatives, in any order; nothing where there are none."""
    return Repeated(Choice(options), 0, None) if options else Sequel([])


def _is(parts: Sequence[Node], name: str) -> bool:
    return bool(parts) and isinstance(parts[0], Name) and parts[0].name == name
