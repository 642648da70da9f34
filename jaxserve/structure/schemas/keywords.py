"""Keywords of JSON Schema: which hold schemas, what their values must be, and who knows them."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.kinds import TYPES

VALUES: Final = ("const", "enum")  # their values are values of answers, not schemas
DEFINITIONS: Final = ("$defs", "definitions")  # not in force unless something refers to them
# A schema; of `items` and `dependencies`, which have another form too, only that one.
ONE: Final = (
    *("not", "if", "then", "else", "contains", "propertyNames"),
    *("items", "additionalItems", "unevaluatedItems"),
    *("additionalProperties", "unevaluatedProperties"),
)
LISTED: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED: Final = ("properties", "patternProperties", "dependentSchemas", "dependencies")
# The first draft that knows a keyword, and the last one, by the years that drafts of 2019 and 2020
# are called by.
SINCE: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("const", "contains", "propertyNames"), 6),
        **dict.fromkeys(("if", "then", "else"), 7),
        **dict.fromkeys(("dependentRequired", "dependentSchemas"), 2019),
        **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems", "minContains"), 2019),
        **dict.fromkeys(("prefixItems",), 2020),
    }
)
UNTIL: Final[Mapping[str, int]] = MappingProxyType({"dependencies": 7, "additionalItems": 2019})


def held(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that a schema's keywords hold, with their paths inside of it."""
    for key, value in schema.items():
        if isinstance(value, list):
            if key in LISTED:
                yield from ((f"{key}/{i}", part) for i, part in enumerate(value))
        elif key in NAMED:
            if isinstance(value, Mapping):
                yield from (
                    (f"{key}/{escaped(name)}", part)
                    for name, part in value.items()
                    if not isinstance(part, list)  # of dependencies
                )
        elif key in ONE:
            yield key, value


def with_held(schema: Mapping[str, Any], new: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a schema with each schema that it holds replaced.

    Args:
        schema: The schema.
        new: Maps a path and the schema there to what takes its place.
    """
    found = dict(schema)
    for key, value in schema.items():
        if isinstance(value, list):
            if key in LISTED:
                found[key] = [new(f"{key}/{i}", part) for i, part in enumerate(value)]
        elif key in NAMED:
            if isinstance(value, Mapping):
                found[key] = {
                    name: part if isinstance(part, list) else new(f"{key}/{escaped(name)}", part)
                    for name, part in value.items()
                }
        elif key in ONE:
            found[key] = new(key, value)
    return found


def escaped(name: str) -> str:
    """Return a name as it stands in a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")


# ---- what values must be


def check_shapes(path: str, schema: Mapping[str, Any]) -> None:
    """Raise SchemaError for the first keyword whose value is not of the form that it must have."""
    for key, value in schema.items():
        expected, is_right = SHAPES.get(key, ("", None))
        if is_right is not None and not is_right(value):
            raise SchemaError(f"{path}/{escaped(key)}", f"is {value!r:.80}; it must be {expected}")


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _are_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_needs(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_are_names, value.values()))


def _are_dependencies(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_schema(needs) or _are_names(needs) for needs in value.values()
    )


def _is_type(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else _are_types(value)


def _are_types(value: Any) -> bool:
    return _are_names(value) and all(name in TYPES for name in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_bound(value: Any) -> bool:
    return isinstance(value, int | float)  # or true or false, of exclusive bounds in draft 4


type Shape = tuple[str, Callable[[Any], bool]]
A_SCHEMA: Final[Shape] = ("a schema, which is an object, true or false", _is_schema)
SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        **dict.fromkeys(ONE, A_SCHEMA),
        **dict.fromkeys(LISTED, ("a list of schemas", _are_schemas)),
        **dict.fromkeys(NAMED, ("an object of schemas", _are_named)),
        "items": ("a schema or a list of them", lambda v: _is_schema(v) or _are_schemas(v)),
        "dependencies": ("an object of schemas and lists of names", _are_dependencies),
        "dependentRequired": ("an object of lists of names", _are_needs),
        "required": ("a list of names", _are_names),
        "enum": ("a list", lambda value: isinstance(value, list)),
        "type": (f"one of {', '.join(TYPES)}, or a list of them", _is_type),
        "$ref": ("a text", lambda value: isinstance(value, str)),
        **dict.fromkeys(
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
            ("a number", _is_bound),
        ),
        **dict.fromkeys(
            ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
            ("a natural number", _is_count),
        ),
        **dict.fromkeys(("pattern", "format"), ("a text", lambda value: isinstance(value, str))),
        "uniqueItems": ("true or false", lambda value: isinstance(value, bool)),
    }
)
