"""Checks of regular expressions that become parts of others."""

import re
from typing import Final

from jaxserve.structure.schemas.patterns import parts_of

OPERATOR: Final = re.compile(r"&&|--|~~|\[")
ESCAPE: Final = re.compile(r"\\.", re.DOTALL)


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
