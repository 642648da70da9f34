"""Formats and patterns, written so that the grammar library follows them as they are meant."""

from collections.abc import Mapping
from typing import Any

from jaxserve.structure.schemas.formats import narrower
from jaxserve.structure.schemas.keywords import DEFINITIONS, with_held
from jaxserve.structure.schemas.patterns import exact_pattern


def exact(schema: Any) -> Any:
    """Return a schema with exact formats and patterns, in force or not."""
    if not isinstance(schema, Mapping):
        return schema
    own = with_held(schema, lambda _, part: exact(part))
    for key in DEFINITIONS:
        if isinstance(own.get(key), Mapping):
            own[key] = {name: exact(part) for name, part in own[key].items()}
    if "additionalItems" in own and "items" in own:
        own = _in_order(own)
    if isinstance(own.get("pattern"), str):
        own["pattern"] = exact_pattern(own["pattern"])
    if isinstance(patterns := own.get("patternProperties"), Mapping):
        own["patternProperties"] = {exact_pattern(name): part for name, part in patterns.items()}
    if added := narrower(own):
        own["allOf"] = [*own.get("allOf", ()), *added]
    return own


def _in_order(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with additionalItems right behind items, without which it is read wrongly."""
    ordered = {}
    for key, value in schema.items():
        if key != "additionalItems":
            ordered[key] = value
        if key == "items":
            ordered["additionalItems"] = schema["additionalItems"]
    return ordered
