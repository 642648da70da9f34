"""Check of JSON schemas for what llguidance would not follow as written, or refuse without words.

The library keeps numbers as floating-point numbers of 64 bits, and prints them with as few digits
as tell them apart. A bound, constant or step with more digits would become another number, without
an error. A reference that leads back to itself becomes a grammar that no text follows.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from urllib.parse import unquote

LOWER: Final = ("minimum", "exclusiveMinimum")
UPPER: Final = ("maximum", "exclusiveMaximum")
COUNTS: Final = (
    *("minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "minContains", "maxContains"),
)
VALUES: Final = ("const", "enum")  # keywords whose numbers are values of answers
BY_NAME: Final = ("properties", "patternProperties", "dependentSchemas")  # schemas by their names
INNER: Final = (  # a schema, or a list of them
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *("items", "prefixItems", "additionalItems", "contains"),
    *("additionalProperties", "propertyNames"),
)
DEFINITIONS: Final = ("$defs", "definitions")  # in force where something refers to them
EXACT: Final = 2**53  # below it every integer is a number of 64 bits
WIDEST: Final = 2**63 - 1  # integers are bounded with 64 bits
FARTHEST: Final = 10**18  # of a bound away from 0, with no bound on the other side
SMALLEST: Final = Decimal("1e-30")  # smaller ones take an expression that cannot be compiled
MAX_COUNT: Final = 2**31 - 1
HELD: Final = "numbers of a schema are held as floating-point numbers of 64 bits"
MARK: Final = "%json"  # a schema inside of a grammar


def schema_problem(text: str) -> str | None:
    """Return why a JSON schema would not be followed as it is written; None if nothing is found.

    The problem begins with its place, a JSON Pointer (RFC 6901). What is no JSON is left to the
    library.
    """
    try:
        schema = _decoder().decode(text)
    except (ValueError, RecursionError):
        return None
    return next(_problems(schema), None)


def grammar_problem(text: str) -> str | None:
    """Return the problem of the first schema inside of a Lark grammar; see `schema_problem`."""
    decoder = _decoder()
    place = text.find(MARK)
    while place >= 0:
        begin = place + len(MARK)
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        try:
            schema, _ = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return None
        if problem := next(_problems(schema), None):
            return problem
        place = text.find(MARK, begin)
    return None


def _decoder() -> json.JSONDecoder:
    """Return a decoder that keeps all digits of numbers."""
    return json.JSONDecoder(parse_float=_number, parse_int=_number)


def _number(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond those of Decimal
        return Decimal("Infinity")


def _problems(root: Any) -> Iterator[str]:
    for path, schema in _schemas(root):
        yield from _numbers(path, schema)
        if "$ref" in schema and _leads_back(root, schema):
            yield f"{path}/$ref leads back to itself, so that no text follows it"


def _schemas(root: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield all schemas that are in force with their paths, outer ones first, without recursion."""
    waiting = [("", root)]
    seen = set[int]()
    while waiting:
        path, schema = waiting.pop()
        if id(schema) in seen:
            continue
        if isinstance(schema, Mapping):
            seen.add(id(schema))
            yield path, schema
        waiting += reversed([*_inner(path, schema), *_referred(root, schema)])


def _inner(path: str, schema: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, list):
        for number, item in enumerate(schema):
            yield f"{path}/{number}", item
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, Mapping):
            for name, item in value.items():
                yield f"{path}/{key}/{_escaped(name)}", item
        elif key in INNER:
            yield f"{path}/{key}", value


def _referred(root: Any, schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schema that another one refers to; all definitions where it goes by a name."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str):
        return
    if _is_path(reference):
        yield unquote(reference[1:]), _found(root, reference)
        return
    for key in DEFINITIONS if isinstance(root, Mapping) else ():
        if isinstance(found := root.get(key), Mapping):
            for name, item in found.items():
                yield f"/{key}/{_escaped(name)}", item


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# ---- numbers


def _numbers(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield from _bounds(path, schema)
    if isinstance(step := schema.get("multipleOf"), Decimal):
        yield from _inexact(f"{path}/multipleOf", step)
    for key in VALUES:
        for place, value in _values(f"{path}/{key}", schema.get(key)):
            yield from _inexact(place, value)
    for key in COUNTS:
        if isinstance(value := schema.get(key), Decimal) and value > MAX_COUNT:
            yield f"{path}/{key} is {_shown(value)}; it must be at most {MAX_COUNT}"


def _bounds(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    whole = _is_integer(schema.get("type"))
    for key in (*LOWER, *UPPER):
        value = schema.get(key)
        if not isinstance(value, Decimal) or _bounds_nothing(key, value, whole):
            continue
        yield from _inexact(f"{path}/{key}", value)
        if whole and key.startswith("exclusive") and abs(value) >= EXACT:
            yield f"{path}/{key} is {_shown(value)}; for integers it must be below 2^53"
        if _is_too_far(key, value, schema):
            yield f"{path}/{key} is {_shown(value)}; such a far bound cannot be followed"


def _is_too_far(key: str, value: Decimal, schema: Mapping[str, Any]) -> bool:
    """Return whether the library has no expression for the numbers beyond a bound."""
    sides = (LOWER, UPPER)
    if all(any(bound in schema for bound in side) for side in sides):
        return abs(value) > WIDEST
    outward = -value if key in LOWER else value
    return outward > WIDEST or outward <= -FARTHEST


def _is_integer(kind: Any) -> bool:
    """Return whether the numbers that a schema's type allows are integers."""
    kinds = kind if isinstance(kind, list) else [kind]
    return "integer" in kinds and "number" not in kinds


def _bounds_nothing(key: str, value: Decimal, whole: bool) -> bool:
    """Return whether a bound is beyond the integers that the library counts to: its own holds."""
    return whole and key == "maximum" and value >= WIDEST


def _inexact(place: str, value: Decimal) -> Iterator[str]:
    nearest = float(value)
    if not math.isfinite(nearest) or 0 < abs(value) < SMALLEST:
        yield f"{place} is {_shown(value)}; such large or small numbers cannot be followed"
    elif Decimal(repr(nearest)) != value:
        yield f"{place} is {_shown(value)}; {HELD}, and the nearest one is {nearest!r}"


def _values(path: str, value: Any) -> Iterator[tuple[str, Decimal]]:
    """Yield the numbers inside of a value with their paths, without recursion."""
    waiting = [(path, value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, Decimal):
            yield place, value
        elif isinstance(value, list):
            waiting += [(f"{place}/{number}", item) for number, item in enumerate(value)][::-1]
        elif isinstance(value, Mapping):
            waiting += [(f"{place}/{_escaped(name)}", v) for name, v in value.items()][::-1]


def _shown(value: Decimal) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# ---- references


def _leads_back(root: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a schema must be followed to follow itself, by $ref and allOf alone."""
    seen = set[int]()
    waiting = list(_needed(root, schema))
    while waiting:
        needed = waiting.pop()
        if needed is schema:
            return True
        if id(needed) not in seen:
            seen.add(id(needed))
            waiting += _needed(root, needed)
    return False


def _needed(root: Any, schema: Any) -> Iterator[Any]:
    """Yield the schemas that the same text has to follow."""
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and _is_path(reference):
        yield _found(root, reference)
    parts = schema.get("allOf")
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        yield from parts


def _is_path(reference: str) -> bool:
    """Return whether a reference is a path in the same schema, and not a name or another file."""
    return reference == "#" or reference.startswith("#/")


def _found(root: Any, reference: str) -> Any:
    """Return what a reference into the same schema names; None if nothing is there."""
    found = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
