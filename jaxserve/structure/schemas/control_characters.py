"""Control characters in constants and patterns, which the grammar library would leave out.

JSON writes most of them as \\u escapes alone. llguidance 1.9.1 drops a literal one from a pattern,
so that "^a\\x0bb$" is followed by "ab", and from a constant where those escapes are not allowed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.keywords import VALUES, escaped
from jaxserve.structure.schemas.patterns import literal_characters
from jaxserve.structure.schemas.walk import schemas

# All but \b \t \n \f \r, which have escapes of their own.
CONTROL: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def check_control_characters(root: Any, in_values: bool) -> None:
    """Raise SchemaError for the first pattern, or value, with a control character.

    Args:
        root: Schema.
        in_values: Whether const and enum are looked at.
    """
    for path, schema in schemas(root):
        for place, pattern in _patterns(path, schema):
            if any(map(CONTROL.match, literal_characters(pattern))):
                raise SchemaError(place, "has a control character, which cannot be followed")
        for key in VALUES:
            if in_values and any(CONTROL.search(text) for text in _texts(schema.get(key))):
                problem = "has a control character, which cannot be followed where names are open"
                raise SchemaError(f"{path}/{key}", f"{problem} (additionalProperties is not false)")


def has_open_names(root: Any) -> bool:
    """Return whether an object may have names beside those that its schema knows.

    Such a name could be a known one in another spelling if it may have \\u escapes.
    """
    return any(
        not schema.keys().isdisjoint(("properties", "patternProperties", "required"))
        and schema.get("additionalProperties") is not False
        for _, schema in schemas(root)
    )


def _patterns(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if isinstance(pattern := schema.get("pattern"), str):
        yield f"{path}/pattern", pattern
    if isinstance(named := schema.get("patternProperties"), Mapping):
        yield from ((f"{path}/patternProperties/{escaped(name)}", name) for name in named)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts inside of a value, without recursion."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, Mapping):
            waiting += item.values()
