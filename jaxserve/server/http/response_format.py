"""Parse `response_format`: OpenAI's types, and further ones in the same manner."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.server.http.errors import UnsupportedError, check_fields
from jaxserve.structure import Structure

FIELD = "response_format"
WHAT = f"this {FIELD}"
TYPES: Mapping[str, str] = MappingProxyType(  # by type, the field that has to come with it
    {
        "text": "",
        "json_object": "",
        "json_schema": "json_schema",
        "regex": "regex",
        "choice": "choice",
        "lark": "lark",
    }
)
SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})


def structure_in(given: Mapping[str, Any] | None) -> Structure | None:
    """Return the structure that the output must follow; None for plain text.

    A JSON schema is always enforced, as OpenAI does where `strict` is true.
    """
    if given is None:
        return None
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise UnsupportedError(
            f"{FIELD}.type", f"is {kind!r:.80}; only {', '.join(TYPES)} are supported"
        )
    member = TYPES[kind]
    check_fields(given, {"type", member} - {""}, FIELD, WHAT)
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure.of(kind, True, FIELD)
    path = f"{FIELD}.{member}"
    if member not in given:
        raise RequestError(path, "is missing")
    if kind == "json_schema":
        return Structure.of(kind, _schema(given[member], path), f"{path}.schema")
    return Structure.of(kind, given[member], path)


def _schema(given: Any, path: str) -> Any:
    if not isinstance(given, Mapping):
        raise RequestError(path, f"is {given!r:.80}; it must be an object with name and schema")
    check_fields(given, SCHEMA_FIELDS, path, WHAT)
    if not isinstance(given.get("strict"), bool | None):
        raise RequestError(
            f"{path}.strict", f"is {given['strict']!r:.80}; it must be true or false"
        )
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"{path}.schema", f"is {schema!r:.80}; it must be a JSON schema object")
    return schema
