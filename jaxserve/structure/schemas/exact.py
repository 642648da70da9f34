"""Formats and patterns, written so that the grammar library follows them as they are meant."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from jaxserve.structure.schemas.formats import narrower
from jaxserve.structure.schemas.patterns import exact_pattern
from jaxserve.structure.schemas.walk import schemas


def exact(root: Any) -> Any:
    """Return a schema with exact formats and patterns, wherever one is in force.

    A reference may lead to any place, so that the schemas are changed where they stand, in a copy.
    """
    copy = deepcopy(root)
    for _, schema in list(schemas(copy)):
        if isinstance(schema, dict):
            _make_exact(schema)
    return copy


def _make_exact(schema: dict[str, Any]) -> None:
    if "additionalItems" in schema and "items" in schema:
        ordered = _in_order(schema)
        schema.clear()
        schema.update(ordered)
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = exact_pattern(schema["pattern"])
    if isinstance(patterns := schema.get("patternProperties"), Mapping):
        schema["patternProperties"] = {exact_pattern(name): p for name, p in patterns.items()}
    if added := narrower(schema):
        parts = schema.get("allOf", [])
        schema["allOf"] = [*(parts if isinstance(parts, list) else []), *added]


def _in_order(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with additionalItems right behind items, without which it is read wrongly."""
    ordered = {}
    for key, value in schema.items():
        if key != "additionalItems":
            ordered[key] = value
        if key == "items":
            ordered["additionalItems"] = schema["additionalItems"]
    return ordered
