"""Unions and intersections of schemas, without the cases that nothing follows.

The grammar library takes every combination of the options of two anyOf that hold together as a case
of its own. Where a schema has many of them, such as one if/then for each value of a property, most
combinations exclude themselves; they are left out here.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from jaxserve.structure.schemas.disjoint import disjoint
from jaxserve.structure.schemas.document import Document

MOST_CASES: Final = 512


def any_of(options: Iterable[Any]) -> Any:
    """Return the union of schemas: False for none, True if one of them is."""
    left = []
    for option in options:
        if option is True or option == {}:
            return True
        if option is not False:
            left += option["anyOf"] if option.keys() == {"anyOf"} else [option]
    if not left:
        return False
    return left[0] if len(left) == 1 else {"anyOf": left}


def all_of(document: Document, parts: Iterable[Any]) -> Any:
    """Return the intersection of schemas, of which unions are multiplied out into cases.

    Where that would make more than MOST_CASES of them, the unions stay as they are.
    """
    firm: list[Any] = []
    unions: list[list[Any]] = []
    for part in parts:
        if part is False:
            return False
        if part is True or part == {}:
            continue
        if part.keys() == {"anyOf"}:
            unions.append(part["anyOf"])
        else:
            firm += part["allOf"] if part.keys() == {"allOf"} else [part]
    if not unions:
        return _conjunction(firm)
    union = _multiplied(document, _conjunction(firm), unions)
    if union is None:
        return _conjunction([*firm, *map(any_of, unions)])
    return union if not firm or union is False else _conjunction([*firm, union])


def _multiplied(document: Document, beside: Any, unions: list[list[Any]]) -> Any:
    """Return the union of the combinations of options that may hold together, beside a schema.

    None is returned where there are too many.
    """
    exclude_each_other: dict[tuple[int, int], bool] = {}

    def excludes(one: Any, other: Any) -> bool:
        pair = id(one), id(other)
        if pair not in exclude_each_other:
            exclude_each_other[pair] = disjoint(document, {"allOf": [beside, one]}, other)
        return exclude_each_other[pair]

    cases: list[list[Any]] = [[]]
    for options in unions:
        left = [option for option in options if not disjoint(document, beside, option)]
        cases = [
            [*case, option]
            for option in left
            for case in cases
            if not any(excludes(part, option) for part in case)
        ]
        if len(cases) > MOST_CASES:
            return None
    return any_of(map(_conjunction, cases))


def _conjunction(parts: list[Any]) -> Any:
    if not parts:
        return True
    if len(parts) == 1:
        return parts[0]
    flat = list[Any]()
    for part in parts:
        flat += part["allOf"] if isinstance(part, Mapping) and part.keys() == {"allOf"} else [part]
    return {"allOf": [part for part in flat if part is not True]}
