"""Kinds of JSON values: the types of JSON Schema, with integers apart from other numbers."""

import json
from collections.abc import Iterable
from typing import Any, Final

type Kinds = frozenset[str]

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
FRACTION: Final = "fraction"  # numbers that are not integers
NUMBERS: Final = frozenset({"integer", FRACTION})
EVERY: Final = frozenset({"null", "boolean", "string", "array", "object"}) | NUMBERS


def kinds_named(keyword: Any) -> Kinds:
    """Return the kinds that a value of `type` names: EVERY for None, unknown names left out."""
    if keyword is None:
        return EVERY
    names = keyword if isinstance(keyword, list) else [keyword]
    kinds = set[str]()
    for name in names:
        if name == "number":
            kinds |= NUMBERS
        elif isinstance(name, str) and name != FRACTION and name in EVERY:
            kinds.add(name)
    return frozenset(kinds)


def type_names(kinds: Iterable[str]) -> list[str] | None:
    """Return the value of `type` for kinds; None if it would need numbers that are not integers."""
    names = set(kinds)
    if FRACTION in names:
        if "integer" not in names:
            return None
        names = names - NUMBERS | {"number"}
    return sorted(names)


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value: 1.0 is an integer, as JSON Schema (6.1.1) has it."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else FRACTION
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_true(schema: Any) -> bool:
    """Return whether a schema is one of those that say nothing."""
    return schema is True or schema == {}


def value_key(value: Any) -> str:
    """Return a text that two JSON values share if and only if JSON Schema takes them as equal."""
    return json.dumps(_integers_as_such(value), sort_keys=True)


def _integers_as_such(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integers_as_such(item) for item in value]
    if isinstance(value, dict):
        return {name: _integers_as_such(item) for name, item in value.items()}
    return value
