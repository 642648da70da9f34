"""Keywords that say nothing, or what a better known keyword says too, in a single schema."""

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.structure.schemas.conjunction import Conjunction
from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.kinds import is_true

# Keywords that hold schemas for the same value: what these evaluate is unknown here.
IN_PLACE: Final = (
    *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if"),
    *("dependentSchemas", "dependencies", "contains"),
)


def plainly_written(document: Document, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema that the same values follow, in fewer kinds of keywords.

    uniqueItems: false is dropped. Of propertyNames a list of names becomes properties without
    others. unevaluatedProperties and unevaluatedItems, with nothing beside them that could have
    evaluated more, are additionalProperties and items. Others stay as they are.
    """
    plain = dict(schema)
    if plain.get("uniqueItems") is False:
        del plain["uniqueItems"]
    for key in ("unevaluatedProperties", "unevaluatedItems"):
        if is_true(plain.get(key)):
            del plain[key]
    if plain.keys().isdisjoint(IN_PLACE):
        _write_unevaluated(plain)
    if "propertyNames" in plain:
        _write_names(document, plain)
    return plain


def _write_names(document: Document, plain: dict[str, Any]) -> None:
    """Replace propertyNames where they are a list, or say nothing but that names are texts."""
    names = plain["propertyNames"]
    if is_true(names) or names == {"type": "string"}:
        del plain["propertyNames"]
        return
    known = Conjunction(document, names)
    if known.values is None or "patternProperties" in plain or not known.is_of_constants:
        return
    del plain["propertyNames"]
    declared = plain.get("properties", {})
    others = plain.get("additionalProperties", True)
    allowed = {name: others for name in known.values.values() if isinstance(name, str)}
    known_names = {name: part if name in allowed else False for name, part in declared.items()}
    plain["properties"] = {**known_names, **{n: p for n, p in allowed.items() if n not in declared}}
    plain["additionalProperties"] = False


def _write_unevaluated(plain: dict[str, Any]) -> None:
    if "unevaluatedProperties" in plain:
        others = plain.pop("unevaluatedProperties")
        plain.setdefault("additionalProperties", others)
    if "unevaluatedItems" in plain:
        others = plain.pop("unevaluatedItems")
        has_list = isinstance(plain.get("items"), list)
        plain.setdefault("additionalItems" if has_list else "items", others)
