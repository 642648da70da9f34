"""Checks of regular expressions that become parts of others."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from jaxserve.structure.schemas.patterns import has_bare_alternatives, parts_of

OPERATOR: Final = re.compile(r"&&|--|~~|\[")
ESCAPE: Final = re.compile(r"\\.", re.DOTALL)
# Classes of Rust's expressions, which are Unicode's (UTS 18, annex C), where those of JSON schemas
# are ASCII's.
WORD: Final = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}"
CLASSES: Mapping[str, str] = MappingProxyType(
    {
        r"\d": r"\p{Nd}",
        r"\D": r"\P{Nd}",
        r"\s": r"\p{White_Space}",
        r"\S": r"\P{White_Space}",
        r"\w": f"[{WORD}]",
        r"\W": f"[^{WORD}]",
    }
)
INSIDE: Mapping[str, str] = MappingProxyType({**CLASSES, r"\w": WORD})  # of a class


def check_ends(expression: str) -> None:
    """Raise ValueError unless all groups, classes and escapes have a beginning and an end.

    Inside of another expression, others would mean something else.
    """
    depth = 0
    for part in parts_of(expression):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if depth < 0:
            raise ValueError("has a ) without a (")
        if part == "\\":
            raise ValueError("ends with a backslash")
        if part.startswith("[") and not re.fullmatch(r"\[.+\]", ESCAPE.sub("x", part), re.DOTALL):
            raise ValueError(f"{part!r:.80} has no end")
    if depth:
        raise ValueError("has a ( without a )")


def check_classes(expression: str) -> None:
    """Raise ValueError for a class that has operators, or another class in it.

    Expressions are followed as patterns of JSON schemas, in whose classes such signs stand for
    themselves.
    """
    for part in parts_of(expression):
        if part.startswith("[") and (found := OPERATOR.search(ESCAPE.sub("", part), 1)):
            raise ValueError(f"{part!r:.80} has {found[0]!r} in a class; escape it")


def check_part(expression: str) -> None:
    """Raise ValueError for an expression that would mean something else as a part of a pattern."""
    check_ends(expression)
    check_classes(expression)


def with_unicode_classes(expression: str) -> str:
    """Return an expression in which the classes of Rust are written as properties of Unicode.

    ValueError is raised for a class with \\W, for which a class has no such property.
    """
    return "".join(map(_with_properties, parts_of(expression)))


def _with_properties(part: str) -> str:
    if not part.startswith("["):
        return CLASSES.get(part, part)
    if r"\W" in ESCAPE.findall(part):
        raise ValueError(rf"{part!r:.80} has \W in a class; write its characters")
    return ESCAPE.sub(lambda found: INSIDE.get(found[0], found[0]), part)


def without_anchors(expression: str) -> str:
    """Return an expression without ^ at its beginning and $ at its end, where both mean all of it.

    A terminal is matched as a whole anyway.
    """
    parts = list(parts_of(expression))
    if has_bare_alternatives(parts):
        return expression
    first = 1 if parts[:1] == ["^"] else 0
    last = len(parts) - 1 if parts[-1:] == ["$"] else len(parts)
    return "".join(parts[first:last])
