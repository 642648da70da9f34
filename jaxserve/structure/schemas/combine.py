"""Unions and intersections of schemas, without the cases that nothing follows.

The grammar library takes every combination of the options of two anyOf that hold together as a case
of its own. Where a schema has many of them, such as one if/then for each value of a property, most
combinations exclude themselves; they are left out here, and so is what a case says twice.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Final

from jaxserve.structure.schemas.disjoint import disjoint
from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.implied import without_implied
from jaxserve.structure.schemas.kinds import is_true

MOST_CASES: Final = 256


def any_of(options: Iterable[Any]) -> Any:
    """Return the union of schemas: False for none, True if one of them is."""
    left = []
    for option in options:
        if is_true(option):
            return True
        if option is not False:
            left += option["anyOf"] if option.keys() == {"anyOf"} else [option]
    if not left:
        return False
    return left[0] if len(left) == 1 else {"anyOf": left}


def all_of(document: Document, parts: Iterable[Any]) -> Any:
    """Return the intersection of schemas in one schema."""
    found = parts_of_all(document, parts)
    return False if found is None else in_one(found)


def in_one(parts: list[Any]) -> Any:
    """Return the schema of all parts together."""
    if not parts:
        return True
    return parts[0] if len(parts) == 1 else {"allOf": parts}


def parts_of_all(document: Document, parts: Iterable[Any]) -> list[Any] | None:
    """Return schemas whose intersection is that of the given ones; None where nothing follows it.

    Unions among them become one, of the combinations that may hold together, unless all of these
    may. Raises SchemaError where there are more than MOST_CASES of them.
    """
    firm: list[Any] = []
    unions: list[list[Any]] = []
    waiting = list(parts)[::-1]
    while waiting:
        part = waiting.pop()
        if part is False:
            return None
        if is_true(part):
            continue
        if part.keys() == {"anyOf"}:
            unions.append(part["anyOf"])
        elif part.keys() == {"allOf"}:
            waiting += part["allOf"][::-1]
        else:
            firm.append(part)
    beside = in_one(firm)
    left = [[o for o in options if not disjoint(document, beside, o)] for options in unions]
    united = _multiplied(document, firm, left) if all(left) else [False]
    return None if False in united else [*firm, *united]


def _multiplied(document: Document, firm: list[Any], unions: list[list[Any]]) -> list[Any]:
    """Return unions as one, of the combinations of their options that hold beside `firm`."""
    beside = in_one(firm)
    exclude_each_other: dict[tuple[int, int], bool] = {}

    def excludes(one: Any, other: Any) -> bool:
        pair = id(one), id(other)
        if pair not in exclude_each_other:
            exclude_each_other[pair] = disjoint(document, {"allOf": [beside, one]}, other)
        return exclude_each_other[pair]

    cases: list[list[Any]] = [[]]
    for options in unions:
        cases = [
            [*case, option]
            for option in options
            for case in cases
            if not any(excludes(part, option) for part in case)
        ]
        if len(unions) > 1 and len(cases) > MOST_CASES:
            raise SchemaError("", f"has more than {MOST_CASES} cases that may hold together")
    if len(unions) > 1 and len(cases) == prod(map(len, unions)):
        return [any_of(options) for options in unions]
    flat = [_flat(case) for case in cases]
    held = [case for case in flat if not disjoint(document, in_one([*firm, *case]), True)]
    union = any_of(in_one(without_implied(document, firm, case)) for case in held)
    return [] if is_true(union) else [union]


def _flat(parts: Iterable[Any]) -> list[Any]:
    """Return parts with those of an allOf in its place."""
    flat = []
    for part in parts:
        is_all = isinstance(part, Mapping) and part.keys() == {"allOf"}
        flat += part["allOf"] if is_all else [part]
    return flat
