"""Last step of a schema that is rewritten: references into $defs, and texts that are excluded."""

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.structure.schemas.other_texts import other_texts
from jaxserve.structure.schemas.walk import escaped, is_path

NAMED: Final = ("properties", "patternProperties")
LISTS: Final = ("allOf", "anyOf")
PARTS: Final = ("items", "prefixItems", "additionalItems", "additionalProperties")


class Finish:
    """Writes schemas in their last form, and names the definitions that they refer to."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # reference in the original -> name in $defs
        self._waiting: list[str] = []

    def schema(self, schema: Any) -> Any:
        """Return a schema with references to $defs, and expressions for texts to leave out."""
        if not isinstance(schema, Mapping):
            return schema
        finished = {}
        for key, value in schema.items():
            if key in NAMED and isinstance(value, Mapping):
                finished[key] = {name: self.schema(part) for name, part in value.items()}
            elif key in (*LISTS, *PARTS):
                is_list = isinstance(value, list)
                finished[key] = [*map(self.schema, value)] if is_list else self.schema(value)
            elif key == "$ref":
                finished[key] = self._reference(value)
            elif key == "not":
                finished["pattern"] = other_texts(value["enum"])
            else:
                finished[key] = value
        return finished

    def _reference(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not is_path(reference) or reference == "#":
            return reference
        return "#/$defs/" + escaped(self.name(reference))

    def name(self, reference: str) -> str:
        """Return the name of a definition, the same one for the same reference."""
        if reference not in self._names:
            name = reference.removeprefix("#/definitions/").removeprefix("#/$defs/")
            while name in self._names.values():
                name += "'"
            self._names[reference] = name
            self._waiting.append(reference)
        return self._names[reference]

    def next_reference(self) -> str | None:
        """Return a reference whose definition has not been asked for yet."""
        return self._waiting.pop() if self._waiting else None
