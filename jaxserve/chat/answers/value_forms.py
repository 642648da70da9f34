"""Forms in which the values that a JSON schema allows are written as one parameter's text."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxserve.chat.answers.schema_kinds import NULL, STRING, Kinds, pointed_to

ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $id".split()
)
DEFINITIONS = ("$defs", "definitions")
OF_OBJECTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
OF_TEXTS = frozenset({"pattern", "minLength", "maxLength", "format"})
# Keywords that say nothing about a string.
OF_OTHERS = frozenset(
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf items prefixItems minItems "
    "maxItems uniqueItems contains minContains maxContains properties required propertyNames "
    "additionalProperties patternProperties minProperties maxProperties".split()
)
REFERENCE = "$ref"
LONGEST_CHAIN = 32  # of references
MOST_STEPS = 4096  # schemas and values that one function's are looked through for


@dataclass(frozen=True)
class Text:
    """Strings by the keywords of a schema."""

    schema: Mapping[str, Any]


@dataclass(frozen=True)
class Fixed:
    """One string."""

    text: str


@dataclass(frozen=True)
class Json:
    """Values of other types, as JSON."""

    schema: Mapping[str, Any]


type Form = Text | Fixed | Json


NONE = Fixed("null")


class ValueForms:
    """Forms of the values of one function's schemas.

    ValueError is raised for a schema whose values have no certain form.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        """Prepare for the schemas within `root`, that of the function's arguments."""
        self._root = root
        self._kinds = Kinds(root)
        self._steps = 0

    def check_object(self) -> None:
        """Raise ValueError unless the root is the schema of an object, by known keywords."""
        _check_shape(self._root)
        _refuse_others(self._root, OF_OBJECTS)
        if "object" not in self._kinds.of(self._root).types:
            raise ValueError("are no object")

    def of(self, schema: Any, depth: int = 0) -> Iterator[Form]:
        """Yield the forms that values of a schema have."""
        if not isinstance(schema, Mapping) or depth > LONGEST_CHAIN:
            raise ValueError("has a schema that is none, or refers to itself")
        _check_shape(schema)
        self._count(1)
        for branches in _branches(schema):
            for branch in branches:
                yield from self.of(branch, depth + 1)
            return
        if REFERENCE in schema:
            _refuse_others(schema, ANNOTATIONS | {REFERENCE})
            yield from self.of(pointed_to(self._root, schema[REFERENCE]), depth + 1)
        elif "enum" in schema or "const" in schema:
            yield from self._listed(schema)
        else:
            yield from self._typed(schema)

    def _count(self, steps: int) -> None:
        """Count schemas and values; ValueError beyond MOST_STEPS: few references make many."""
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise ValueError(f"has more than {MOST_STEPS} alternatives")

    def _listed(self, schema: Mapping[str, Any]) -> Iterator[Form]:
        """Yield the values that a schema lists, if they are of its type."""
        _refuse_others(schema, ANNOTATIONS | {"type", "enum", "const"})
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            values = [value for value in values if value == schema["const"]]
        self._count(len(values))
        types = self._kinds.of({"type": schema["type"]} if "type" in schema else {}).types
        values = [value for value in values if self._kinds.of({"const": value}).types & types]
        for value in values:
            if isinstance(value, str | None):
                yield NONE if value is None else Fixed(value)
        if others := [value for value in values if not isinstance(value, str | None)]:
            yield Json({"enum": others})

    def _typed(self, schema: Mapping[str, Any]) -> Iterator[Form]:
        """Yield a form of each type of a schema without alternatives."""
        kind = self._kinds.of(schema)
        if STRING in kind.types:
            known = ANNOTATIONS | OF_TEXTS | OF_OTHERS | {"type", *DEFINITIONS}
            _refuse_others(schema, known)
            yield Text({key: schema[key] for key in OF_TEXTS if key in schema})
        if kind.names_null:
            yield NONE
        types = schema.get("type", [] if STRING in kind.types else list(kind.types))
        for each in [types] if isinstance(types, str) else types:
            if each not in (STRING, NULL):
                yield self._json({**schema, "type": each})

    def _json(self, schema: Mapping[str, Any]) -> Json:
        """Return values as JSON by a schema, with the definitions that it may refer to."""
        schema = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if f'"{REFERENCE}"' not in json.dumps(schema):
            return Json(schema)
        definitions = {key: self._root[key] for key in DEFINITIONS if key in self._root}
        for reference in _references({**schema, **definitions}):
            if not any(str(reference).startswith(f"#/{key}/") for key in DEFINITIONS):
                raise ValueError(f"refers to {reference!r:.80}, which is no definition")
        return Json({**schema, **definitions})


def _branches(schema: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Yield the alternatives of a schema that consists of alternatives; nothing for another one."""
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(keyword), list):
            _refuse_others(schema, ANNOTATIONS | {keyword})
            if keyword == "allOf" and len(branches) != 1:
                raise ValueError("has allOf")
            yield branches


def _references(schema: Any) -> Iterator[Any]:
    """Yield all references in a schema, and whatever else looks like one."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == REFERENCE:
                yield value
            yield from _references(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


def _check_shape(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a keyword whose value is of a type that it cannot have."""
    for keyword, is_right in SHAPES.items():
        if keyword in schema and not is_right(schema[keyword]):
            raise ValueError(f"has {keyword!r} of a wrong type")


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# Keywords with whether a value is of the type that they have.
SHAPES: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "type": lambda value: isinstance(value, str) or _is_strings(value),
        "properties": lambda value: isinstance(value, Mapping),
        "required": _is_strings,
        "enum": lambda value: isinstance(value, list),
        **dict.fromkeys(("$ref", "format", "pattern"), lambda value: isinstance(value, str)),
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), lambda value: isinstance(value, list)),
    }
)


def _refuse_others(schema: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ValueError for a keyword that is not known."""
    if unknown := sorted(schema.keys() - known):
        raise ValueError(f"has {unknown[0]!r:.80}")
