"""Parts of a case that say nothing beside the others, where a constant shows it.

A case of many if/then has the complement of each `if` that does not hold. Where another one holds,
and both ask for the same property, the complements follow from its constant.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from jaxserve.structure.schemas.conjunction import Conjunction
from jaxserve.structure.schemas.document import Document
from jaxserve.structure.schemas.kinds import is_true, kind_of, kinds_named, value_key

SIMPLE: Final = frozenset(("type", "required", "properties"))
JUDGED: Final = frozenset(("type", "const", "enum", "not", "anyOf", "allOf"))


def without_implied(document: Document, beside: list[Any], parts: list[Any]) -> list[Any]:
    """Return the parts of a case without those that follow from the others.

    Args:
        beside: What holds together with the case.
    """
    together = Conjunction(document, {"allOf": [*beside, *parts]})
    askers = Counter(demand for part in (*beside, *parts) for demand in _demands(part))
    left = []
    for part in parts:
        if _is_implied(document, part, together, askers):
            askers.subtract(_demands(part))
        else:
            left.append(part)
    return _with_exclusions_merged(left)


def _with_exclusions_merged(parts: list[Any]) -> list[Any]:
    """Return parts of which those that exclude texts of one property are a single one."""
    merged: list[Any] = []
    places: dict[tuple[str, ...], int] = {}
    for part in parts:
        name = _excluder(part)
        if name is None:
            merged.append(part)
            continue
        key = (name, *_demands(part))
        if key not in places:
            places[key] = len(merged)
            merged.append(part)
            continue
        first = merged[places[key]]
        texts = [
            *first["properties"][name]["not"]["enum"],
            *part["properties"][name]["not"]["enum"],
        ]
        excluding = {**part["properties"][name], "not": {"enum": texts}}
        merged[places[key]] = {**part, "properties": {name: excluding}}
    return merged


def _excluder(part: Any) -> str | None:
    """Return the name of the property of which a part excludes texts and says nothing else."""
    if not isinstance(part, Mapping) or not part.keys() <= SIMPLE:
        return None
    properties = part.get("properties", {})
    if len(properties) != 1:
        return None
    name, schema = next(iter(properties.items()))
    excludes = isinstance(schema, Mapping) and schema.keys() == {"type", "not"}
    return name if excludes else None


def _is_implied(document: Document, part: Any, together: Conjunction, askers: Counter[str]) -> bool:
    """Return whether a part certainly says nothing that the others do not."""
    if not isinstance(part, Mapping) or not part.keys() <= SIMPLE or "properties" not in part:
        return False
    if any(askers[demand] < 2 for demand in _demands(part)):
        return False
    return all(
        not _has_constants(document, schema)
        and _all_follow(Conjunction(document, together.of_property(name)).constants, schema)
        for name, schema in part["properties"].items()
    )


def _has_constants(document: Document, schema: Any) -> bool:
    """Return whether a schema of a property may be what its constants are known by."""
    return Conjunction(document, schema).constants is not None


def _all_follow(values: Mapping[str, Any] | None, schema: Any) -> bool:
    return bool(values) and all(_follows(value, schema) for value in values.values())


def _follows(value: Any, schema: Any) -> bool:
    """Return whether a value certainly follows a schema."""
    if is_true(schema) or schema is False:
        return schema is not False
    if not schema.keys() <= JUDGED or kind_of(value) not in kinds_named(schema.get("type")):
        return False
    key = value_key(value)
    listed = [schema["const"]] if "const" in schema else schema.get("enum", [value])
    excluded = schema.get("not", {"enum": []})
    return (
        key in map(value_key, listed)
        and key not in map(value_key, excluded["enum"])
        and any(_follows(value, option) for option in schema.get("anyOf", [True]))
        and all(_follows(value, option) for option in schema.get("allOf", []))
    )


def _demands(part: Any) -> list[str]:
    """Return what a part demands beside values of properties, in texts that can be counted."""
    if not isinstance(part, Mapping):
        return []
    required = [f"property {name}" for name in part.get("required", ())]
    return [*required, f"type {part['type']}"] if "type" in part else required
