"""The schemas inside of a JSON schema, and where its references lead.

Paths are JSON Pointers (RFC 6901).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from jaxserve.structure.schemas.keywords import DEFINITIONS, escaped, held

MAX_DIGITS: Final = 10  # of an index in a path


def schemas(root: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield all schemas that are in force with their paths, outer ones first, without recursion.

    Where references go by names, every definition may be in force, and is yielded.
    """
    yield from _schemas(root, with_definitions=goes_by_names(root))


def goes_by_names(root: Any) -> bool:
    """Return whether references may lead to names: $id inside of the schema, $anchor, or a URL."""
    return any(
        _goes_by_name(schema) or (schema is not root and isinstance(schema.get("$id"), str))
        for _, schema in _schemas(root, with_definitions=True)
    )


def _schemas(root: Any, with_definitions: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    waiting = [("", root)]
    seen = set[int]()
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield path, schema
        inner = [(f"{path}/{place}", part) for place, part in held(schema)]
        if with_definitions:
            inner += _definitions(path, schema)
        waiting += reversed([*inner, *_referred(root, schema)])


def _definitions(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in DEFINITIONS:
        if isinstance(named := schema.get(key), Mapping):
            yield from ((f"{path}/{key}/{escaped(name)}", part) for name, part in named.items())


def _goes_by_name(schema: Mapping[str, Any]) -> bool:
    reference = schema.get("$ref")
    return isinstance(reference, str) and not is_path(reference)


def _referred(root: Any, schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schema that another one refers to by its path."""
    reference = _without_own_name(root, schema.get("$ref"))
    if isinstance(reference, str) and is_path(reference):
        found = at_path(root, reference)
        if isinstance(found, Mapping):
            yield unquote(reference[1:]), found


def _without_own_name(root: Any, reference: Any) -> Any:
    """Return a reference without the $id of the whole schema before its path."""
    own = root.get("$id") if isinstance(root, Mapping) else None
    if isinstance(own, str) and isinstance(reference, str):
        return reference.removeprefix(own.rstrip("#")) or "#"
    return reference


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
