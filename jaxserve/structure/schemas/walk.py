"""The schemas inside of a JSON schema, and where its references lead."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

VALUES: Final = ("const", "enum")  # keywords whose numbers are values of answers
BY_NAME: Final = ("properties", "patternProperties", "dependentSchemas", "dependencies")
INNER: Final = (  # a schema, or a list of them
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *("items", "prefixItems", "additionalItems", "contains"),
    *("additionalProperties", "propertyNames"),
)
MAX_DIGITS: Final = 10  # of an index in a path


def schemas(root: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield all schemas that are in force with their paths, outer ones first, without recursion.

    Where references go by names, every object of the schema may be in force, and is yielded.
    """
    has_names = any(map(_goes_by_name, _objects(root)))
    waiting = [("", root)]
    seen = set[int]()
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, Mapping | list) or id(schema) in seen:
            continue
        seen.add(id(schema))
        if isinstance(schema, Mapping):
            yield path, schema
        inner = _everything(path, schema) if has_names else _inner(path, schema)
        waiting += reversed([*inner, *_referred(root, schema)])


def _objects(root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all objects of a value, without recursion."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def goes_by_names(root: Any) -> bool:
    """Return whether references may lead to names: $id inside of the schema, $anchor, or a URL."""
    return any(
        _goes_by_name(schema) or (schema is not root and isinstance(schema.get("$id"), str))
        for schema in _objects(root)
    )


def _goes_by_name(schema: Mapping[str, Any]) -> bool:
    reference = schema.get("$ref")
    return isinstance(reference, str) and not is_path(reference)


def _everything(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in pairs:
        if isinstance(item, Mapping | list) and key not in VALUES:
            yield f"{path}/{escaped(str(key))}", item


def _inner(path: str, schema: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, list):
        for number, item in enumerate(schema):
            if isinstance(item, Mapping):
                yield f"{path}/{number}", item
        return
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, Mapping):
            for name, item in value.items():
                if isinstance(item, Mapping):
                    yield f"{path}/{key}/{escaped(name)}", item
        elif key in INNER:
            yield f"{path}/{key}", value


def _referred(root: Any, schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schema that another one refers to by its path."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if isinstance(reference, str) and is_path(reference):
        found = at_path(root, reference)
        if isinstance(found, Mapping):
            yield unquote(reference[1:]), found


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# ---- references


def with_needed(root: Any, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas that the same text has to follow with it."""
    seen = set[int]()
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += [inner for _, inner in needed(root, "", part)]


def needed(root: Any, path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that the same text has to follow, each with the place that says so."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and is_path(reference):
        yield f"{path}/$ref", at_path(root, reference)
    parts = schema.get("allOf")
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        yield from ((f"{path}/allOf/{number}", part) for number, part in enumerate(parts))


def is_path(reference: str) -> bool:
    """Return whether a reference is a path in the same schema, and not a name or another file."""
    return reference == "#" or reference.startswith("#/")


def at_path(root: Any, reference: str) -> Any:
    """Return what a reference into the same schema names; None if nothing is there."""
    found = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and _is_index(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= MAX_DIGITS
