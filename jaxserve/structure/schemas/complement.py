"""Complements of keywords: schemas that hold for exactly the values which break a keyword.

A value breaks a schema if it breaks one of its keywords, so the complement of a schema is the union
of its keywords' complements. Each keyword concerns one type: values of others never break it. Some
complements cannot be written, since nothing says that some item or some property is of a kind, that
a number is no multiple of another, or that a text does not match an expression.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

from jaxserve.structure.schemas.conjunction import Conjunction, items_of
from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.keywords import escaped
from jaxserve.structure.schemas.kinds import (
    NUMBERS,
    Kinds,
    is_true,
    kind_of,
    type_names,
    value_key,
)

type Opposite = Callable[[str, Any, Any], Any]
NO_COMPLEMENT: Final = "has no opposite that can be followed (it stands in 'not', 'if' or 'oneOf')"
NO_FRACTIONS: Final = (
    "has no opposite that can be followed: numbers that are not integers cannot be told apart"
)


@dataclass(frozen=True)
class Place:
    """A schema whose complement is asked for."""

    document: Document
    path: str
    schema: Mapping[str, Any]
    kinds: Kinds  # kinds of values that can get here and that the schema's `type` allows
    beside: Conjunction  # what is known to hold for the same value
    opposite: Opposite  # complement of a schema, from its path and what holds beside it

    def refused(self, key: str, problem: str = NO_COMPLEMENT) -> SchemaError:
        return SchemaError(f"{self.path}/{escaped(key)}", problem)


def opposites_of_keywords(place: Place) -> Iterator[Any]:
    """Yield the complements of a schema's keywords, but for type, allOf and the like.

    Raises SchemaError where one cannot be written.
    """
    values = _listed(place)
    if values is not None:
        yield from _other_values(place, values)
    for key, value in place.schema.items():
        kind, rule = RULES.get(key, (None, None))
        if rule is None:
            continue
        if kind == "number":
            names = type_names(place.kinds & NUMBERS)
            if names is None:
                raise place.refused(key)
            kind = names[0] if names else None
        elif kind not in place.kinds:
            kind = None
        if kind is not None:
            for opposite in rule(place, key, value):
                yield {"type": kind, **opposite}


def other_kinds(path: str, kinds: Kinds, excluded: Kinds) -> Any:
    """Return the schema of the values among `kinds` that are of none of the excluded kinds."""
    names = type_names(kinds - excluded)
    if names is None:
        raise SchemaError(f"{path}/type", NO_FRACTIONS)
    return {"type": names} if names else False


# ---- constants


def _listed(place: Place) -> list[Any] | None:
    """Return the values that const and enum allow; None without them."""
    listed = []
    if "const" in place.schema:
        listed.append([place.schema["const"]])
    if "enum" in place.schema:
        listed.append(place.schema["enum"])
    if not listed:
        return None
    keys = set.intersection(*({value_key(value) for value in values} for values in listed))
    named = {value_key(value): value for value in listed[0]}
    return [value for key, value in named.items() if key in keys]


def _other_values(place: Place, values: Sequence[Any]) -> Iterator[Any]:
    by_kind: dict[str, list[Any]] = {}
    for value in values:
        by_kind.setdefault(kind_of(value), []).append(value)
    has_numbers = not NUMBERS.isdisjoint(by_kind)
    concerned = frozenset(by_kind) | (NUMBERS if has_numbers else frozenset())
    yield other_kinds(place.path, place.kinds, concerned)
    if "boolean" in by_kind and "boolean" in place.kinds:
        yield {"enum": [value for value in (False, True) if value not in by_kind["boolean"]]}
    if "string" in by_kind and "string" in place.kinds:
        # Written as an expression at the end; see finish.py.
        yield {"type": "string", "not": {"enum": by_kind["string"]}}
    if has_numbers:
        numbers = [value for kind in NUMBERS for value in by_kind.get(kind, ())]
        yield from _other_numbers(place, sorted(numbers))
    for kind in ("array", "object"):
        if kind in by_kind and kind in place.kinds:
            described = map(_described, by_kind[kind])
            key = "const" if "const" in place.schema else "enum"
            yield {
                "allOf": [
                    place.opposite(f"{place.path}/{key}", schema, {"type": kind})
                    for schema in described
                ]
            }


def _other_numbers(place: Place, numbers: Sequence[float]) -> Iterator[Any]:
    """Yield the ranges between numbers."""
    names = type_names(place.kinds & NUMBERS)
    if names is None:
        raise place.refused("const" if "const" in place.schema else "enum")
    if names == ["integer"]:
        numbers = [int(number) for number in numbers if kind_of(number) == "integer"]
        if not numbers:
            yield {"type": "integer"}
            return
        yield {"type": "integer", "maximum": numbers[0] - 1}
        for number, following in pairwise(numbers):
            if following - number > 1:
                yield {"type": "integer", "minimum": number + 1, "maximum": following - 1}
        yield {"type": "integer", "minimum": numbers[-1] + 1}
    elif names:
        yield {"type": "number", "exclusiveMaximum": numbers[0]}
        for number, following in pairwise(numbers):
            yield {"type": "number", "exclusiveMinimum": number, "exclusiveMaximum": following}
        yield {"type": "number", "exclusiveMinimum": numbers[-1]}


def _described(value: Any) -> Mapping[str, Any]:
    """Return the schema of one array or object, in keywords that have complements."""
    count = len(value)
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        return {"type": "array", "minItems": count, "maxItems": count, "items": items}
    properties = {name: {"const": item} for name, item in value.items()}
    return {
        "type": "object",
        "required": list(value),
        "properties": properties,
        "maxProperties": count,
    }


# ---- one rule per keyword

type Rule = Callable[[Place, str, Any], Iterator[Mapping[str, Any]]]


def _never(place: Place, key: str, value: Any) -> Iterator[Mapping[str, Any]]:
    yield from ()
    raise place.refused(key)


def _bound(opposite: str) -> Rule:
    def rule(place: Place, key: str, value: Any) -> Iterator[Mapping[str, Any]]:
        if isinstance(value, bool):  # exclusiveMinimum of draft 4
            raise place.refused(key)
        yield {opposite: value}

    return rule


def _at_least(opposite: str) -> Rule:
    def rule(place: Place, key: str, value: Any) -> Iterator[Mapping[str, Any]]:
        if value > 0:
            yield {opposite: value - 1}

    return rule


def _at_most(opposite: str) -> Rule:
    def rule(place: Place, key: str, value: Any) -> Iterator[Mapping[str, Any]]:
        yield {opposite: value + 1}

    return rule


def _required(place: Place, key: str, value: Any) -> Iterator[Mapping[str, Any]]:
    for name in value:
        yield {"properties": {name: False}}


def _properties(place: Place, key: str, value: Any) -> Iterator[Mapping[str, Any]]:
    for name, schema in value.items():
        path = f"{place.path}/{key}/{escaped(name)}"
        known = place.beside.of_property(name)
        if (opposite := place.opposite(path, schema, known)) is not False:
            yield {"required": [name], "properties": {name: opposite}}


def _patterns(place: Place, key: str, value: Any) -> Iterator[Mapping[str, Any]]:
    for name, schema in value.items():
        if not is_true(schema):
            raise SchemaError(f"{place.path}/{key}/{escaped(name)}", NO_COMPLEMENT)
    yield from ()


def _other_properties(place: Place, key: str, value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the complement of additionalProperties, if it is known which others may come.

    With `false`, and no properties beside it, it is a count.
    """
    if is_true(value):
        return
    named = place.schema.get("properties", {})
    others = place.beside.only_names
    if "patternProperties" in place.schema or (others is None and (named or value is not False)):
        raise place.refused(key)
    if others is None:
        yield {"minProperties": 1}
        return
    for name in others:
        if name not in named:
            known = place.beside.of_property(name)
            opposite = place.opposite(f"{place.path}/{key}", value, known)
            if opposite is not False:
                yield {"required": [name], "properties": {name: opposite}}


def _items(place: Place, key: str, value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the complement of each listed item, and that of `false` for the items behind them."""
    if key != _keyword_of_items(place):
        return
    listed, rest = items_of(place.document, place.schema)
    for i, schema in enumerate(listed):
        known = place.beside.of_item(i)
        opposite = place.opposite(f"{place.path}/{key}/{i}", schema, known)
        if opposite is not False:
            yield {"minItems": i + 1, "items": [*[True] * i, opposite]}
    if is_true(rest):
        return
    if rest is not False:
        raise place.refused("additionalItems" if isinstance(value, list) else "items")
    yield {"minItems": len(listed) + 1}


def _keyword_of_items(place: Place) -> str:
    """Return the keyword that says which items come first, where two could."""
    has_list = isinstance(place.schema.get("items"), list) or place.document.has_item_lists
    return "items" if has_list or "prefixItems" not in place.schema else "prefixItems"


def _contains(place: Place, key: str, value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the complement of contains: no item follows the schema."""
    if place.schema.get("minContains", 1) != 1 or "maxContains" in place.schema:
        raise place.refused(key)
    yield {"items": place.opposite(f"{place.path}/{key}", value, True)}


RULES: Final[Mapping[str, tuple[str, Rule]]] = MappingProxyType(
    {
        "minimum": ("number", _bound("exclusiveMaximum")),
        "exclusiveMinimum": ("number", _bound("maximum")),
        "maximum": ("number", _bound("exclusiveMinimum")),
        "exclusiveMaximum": ("number", _bound("minimum")),
        "multipleOf": ("number", _never),
        "minLength": ("string", _at_least("maxLength")),
        "maxLength": ("string", _at_most("minLength")),
        "pattern": ("string", _never),
        "format": ("string", _never),
        "minItems": ("array", _at_least("maxItems")),
        "maxItems": ("array", _at_most("minItems")),
        "items": ("array", _items),
        "prefixItems": ("array", _items),
        "contains": ("array", _contains),
        "uniqueItems": ("array", _never),
        "unevaluatedItems": ("array", _never),
        "required": ("object", _required),
        "properties": ("object", _properties),
        "patternProperties": ("object", _patterns),
        "additionalProperties": ("object", _other_properties),
        "propertyNames": ("object", _never),
        "minProperties": ("object", _at_least("maxProperties")),
        "maxProperties": ("object", _at_most("minProperties")),
        "unevaluatedProperties": ("object", _never),
    }
)
