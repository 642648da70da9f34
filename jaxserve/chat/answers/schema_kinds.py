"""Kinds of the values that a JSON schema allows: by them, a value that is text is read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

STRING = "string"
NULL = "null"
TYPES = frozenset({STRING, NULL, "boolean", "number", "object", "array"})
# Types by other names, of which those of Python are no JSON Schema, and yet come up.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "integer": "number",
        "int": "number",
        "float": "number",
        "bool": "boolean",
        "str": STRING,
        "list": "array",
        "dict": "object",
    }
)
LONGEST_CHAIN = 32  # of references and nested schemas that are followed


@dataclass(frozen=True)
class Kind:
    """Values that a schema allows.

    `types` are their JSON types; integers are numbers. `texts` are the strings among them, or None
    where they are not listed one by one.
    """

    types: frozenset[str] = TYPES
    texts: frozenset[str] | None = None

    @property
    def names_null(self) -> bool:
        """Return whether the schema allows null in so many words, and not because of anything."""
        return NULL in self.types and self.types != TYPES

    def both(self, other: "Kind") -> "Kind":
        """Return the kind of values that are of both kinds."""
        texts = other.texts if self.texts is None else self.texts
        if self.texts is not None and other.texts is not None:
            texts = self.texts & other.texts
        return Kind(self.types & other.types, texts)


def any_of(kinds: Sequence[Kind]) -> Kind:
    """Return the kind of values that are of one of these kinds."""
    types = frozenset[str]().union(*(kind.types for kind in kinds))
    listed = [kind.texts for kind in kinds if STRING in kind.types]
    known = [texts for texts in listed if texts is not None]
    if not listed or len(known) < len(listed):
        return Kind(types)
    return Kind(types, frozenset[str]().union(*known))


ANYTHING = Kind()
NOTHING = Kind(frozenset())


class Kinds:
    """Kinds of the schemas of one document, which may refer to its definitions.

    A reference that leads nowhere, or around in a circle, allows anything.
    """

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._known: dict[str, Kind] = {}

    def of(self, schema: Any, depth: int = 0) -> Kind:
        """Return the kind of a schema's values."""
        if not isinstance(schema, Mapping) or depth > LONGEST_CHAIN:
            return NOTHING if schema is False else ANYTHING
        kind = ANYTHING
        for own in self._constraints(schema, depth):
            kind = kind.both(own)
        return kind

    def _constraints(self, schema: Mapping[str, Any], depth: int) -> Iterator[Kind]:
        """Yield a kind for each keyword that says something about kinds."""
        if isinstance(schema.get("type"), str | list):
            yield Kind(frozenset(_types(schema["type"])))
        elif kind := _implied(schema):
            yield kind
        if isinstance(schema.get("enum"), list):
            yield _listed(schema["enum"])
        if "const" in schema:
            yield _listed([schema["const"]])
        if isinstance(schema.get("$ref"), str):
            yield self._referred(schema["$ref"], depth)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list):
                yield any_of([self.of(branch, depth + 1) for branch in branches])
        if isinstance(branches := schema.get("allOf"), list):
            yield from (self.of(branch, depth + 1) for branch in branches)

    def _referred(self, reference: str, depth: int) -> Kind:
        if reference not in self._known:
            # In place while it is being found, for references in a circle.
            self._known[reference] = ANYTHING
            self._known[reference] = self.of(pointed_to(self._root, reference), depth + 1)
        return self._known[reference]


def pointed_to(root: Mapping[str, Any], reference: str) -> Any:
    """Return the schema that a reference within the document names; None where there is none."""
    found: Any = root
    if reference == "#":
        return found
    if not reference.startswith("#/"):
        return None
    for step in reference.removeprefix("#/").split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def properties(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of an object's members by name, those of its alternatives as well."""
    found: dict[str, Any] = {}
    for schema in _alternatives(root, root, set(), 0):
        own = schema.get("properties")
        for name, each in own.items() if isinstance(own, Mapping) else ():
            found.setdefault(name, each)
    return found


def _alternatives(
    root: Mapping[str, Any], schema: Any, seen: set[str], depth: int
) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and those that it is put together from; `seen` are references before it."""
    if not isinstance(schema, Mapping) or depth > LONGEST_CHAIN:
        return
    yield schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from _alternatives(root, pointed_to(root, reference), seen, depth + 1)
    for keyword in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            yield from _alternatives(root, branch, seen, depth + 1)


def _implied(schema: Mapping[str, Any]) -> Kind | None:
    """Return the kind that a schema without a type must mean by its keywords."""
    if "properties" in schema or "additionalProperties" in schema:
        return Kind(frozenset({"object"}))
    return Kind(frozenset({"array"})) if "items" in schema else None


def _types(named: str | list[Any]) -> Iterator[str]:
    for name in [named] if isinstance(named, str) else named:
        if isinstance(name, str):
            yield ALIASES.get(name, name)


def _listed(values: list[Any]) -> Kind:
    """Return the kind of values that are listed one by one."""
    texts = frozenset(value for value in values if isinstance(value, str))
    return Kind(frozenset(map(_type_of, values)), texts)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return NULL
        case bool():
            return "boolean"
        case str():
            return STRING
        case int() | float():
            return "number"
        case list():
            return "array"
    return "object"
