"""Last step of a schema that is rewritten: references into $defs, and texts that are excluded."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from jaxserve.structure.schemas.keywords import with_held
from jaxserve.structure.schemas.other_texts import other_texts
from jaxserve.structure.schemas.walk import is_path


class Names:
    """Names in $defs of the schemas that are referred to, in the order of their first use."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # reference in the original -> name

    def name(self, reference: str) -> str:
        """Return the name of what a reference leads to, the same one for the same reference.

        It reads like the original, in letters that need no escapes.
        """
        if reference not in self._names:
            place = unquote(reference).removeprefix("#/definitions/").removeprefix("#/$defs/")
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", place)
            while name in self._names.values():
                name += "_"
            self._names[reference] = name
        return self._names[reference]

    def after(self, count: int) -> list[str]:
        """Return the references that were named after the first `count` ones."""
        return list(self._names)[count:]


def finished(schema: Any, names: Names) -> Any:
    """Return a schema with references into $defs, and expressions for texts to leave out."""
    if not isinstance(schema, Mapping):
        return schema
    excluded = schema.get("not")
    reference = schema.get("$ref")
    own = {key: value for key, value in schema.items() if key != "not"}
    if excluded is not None:
        own["pattern"] = other_texts(excluded["enum"])
    if isinstance(reference, str) and is_path(reference) and reference != "#":
        own["$ref"] = "#/$defs/" + names.name(reference)
    return with_held(own, lambda _, part: finished(part, names))


def with_definitions(root: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a schema with its $defs.

    The library refuses a definition that is false; what refers to one is false itself.
    """
    false = {f"#/$defs/{name}" for name, part in definitions.items() if part is False}
    if false:
        root = _without_false(root, false)
        definitions = {
            name: _without_false(part, false)
            for name, part in definitions.items()
            if part is not False
        }
    return {**root, "$defs": definitions} if definitions and isinstance(root, Mapping) else root


def _without_false(schema: Any, false: set[str]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("$ref") in false:
        return False
    return with_held(schema, lambda _, part: _without_false(part, false))
