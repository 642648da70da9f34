"""Check of JSON schemas for what llguidance would not follow as written, or refuse without words.

The library keeps numbers as floating-point numbers of 64 bits, and prints them with as few digits
as tell them apart. A bound, constant or step with more digits would become another number, without
an error. A reference that leads back to itself becomes a grammar that no text follows.

Schemas come from clients: the process that checks grammars (worker.py) runs this, under its bounds
of time and memory.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from jaxserve.structure.schemas.embedded import embedded_schemas
from jaxserve.structure.schemas.keywords import VALUES, escaped
from jaxserve.structure.schemas.walk import needed, schemas, with_needed

LOWER: Final = ("minimum", "exclusiveMinimum")
UPPER: Final = ("maximum", "exclusiveMaximum")
LENGTHS: Final = ("minLength", "maxLength")
COUNTS: Final = ("minItems", "maxItems", "minProperties", "maxProperties")
EXACT: Final = 2**53  # below it every integer is a number of 64 bits
WIDEST: Final = 2**63 - 1  # integers are bounded with 64 bits
FARTHEST: Final = 10**18  # of a bound away from 0, with no bound on the other side
SMALLEST: Final = Decimal("1e-30")  # smaller bounds take an expression that cannot be compiled
MOST_OF_STEPS: Final = 2**32  # the library multiplies steps that hold together in so many numbers
MAX_LENGTH: Final = 2**32 - 1
MAX_COUNT: Final = 2**64 - 1
LARGE_MULTIPLE: Final = "has several multipleOf at once, whose common multiple is too large"
HELD: Final = "numbers of a schema are held as floating-point numbers of 64 bits"


def problem_of(kind: str, text: str) -> str | None:
    """Return why a Structure's schemas would not be followed as written; None if nothing is found.

    `kind` and `text` are those of the Structure.
    """
    match kind:
        case "json_schema":
            return schema_problem(text)
        case "lark":
            return grammar_problem(text)
    return None


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
    for embedded in embedded_schemas(text, _decoder()):
        if problem := next(_problems(embedded.schema), None):
            return f"the schema in line {embedded.line}: {problem}"
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
    for path, schema in schemas(root):
        yield from _numbers(path, schema)
        yield from _steps(root, path, schema)
    if loop := _loop(root):
        yield f"{loop} leads back to itself, so that no text follows it"


# ---- numbers


def _numbers(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    if _has_numbers(schema.get("type")):
        yield from _bounds(path, schema)
        if isinstance(step := schema.get("multipleOf"), Decimal):
            yield from _inexact(f"{path}/multipleOf", step)
    for key in VALUES:
        for place, value in _values(f"{path}/{key}", schema.get(key)):
            yield from _inexact(place, value)
    for keys, most in ((LENGTHS, MAX_LENGTH), (COUNTS, MAX_COUNT)):
        for key in keys:
            if isinstance(value := schema.get(key), Decimal) and value > most:
                yield f"{path}/{key} is {_shown(value)}; it must be at most {most}"


def _has_numbers(kind: Any) -> bool:
    """Return whether a schema's type allows numbers; it does if there is none."""
    kinds = kind if isinstance(kind, list) else [kind]
    return kind is None or "integer" in kinds or "number" in kinds


def _is_integer(kind: Any) -> bool:
    """Return whether the numbers that a schema's type allows are integers."""
    kinds = kind if isinstance(kind, list) else [kind]
    return "integer" in kinds and "number" not in kinds


def _bounds(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    whole = _is_integer(schema.get("type"))
    for key in (*LOWER, *UPPER):
        value = schema.get(key)
        if not isinstance(value, Decimal) or _bounds_nothing(key, value, whole):
            continue
        place = f"{path}/{key}"
        if _is_too_far(key, value, schema):
            yield f"{place} is {_shown(value)}; such a far bound cannot be followed"
        if 0 < abs(value) < SMALLEST:
            yield f"{place} is {_shown(value)}; such small bounds cannot be followed"
        if key.startswith("exclusive") and abs(value) >= EXACT:
            yield f"{place} is {_shown(value)}; exclusive bounds must be below 2^53"
        yield from _inexact(place, value, whole)


def _is_too_far(key: str, value: Decimal, schema: Mapping[str, Any]) -> bool:
    """Return whether the library has no expression for the numbers beyond a bound."""
    sides = (LOWER, UPPER)
    if all(any(bound in schema for bound in side) for side in sides):
        return abs(value) > WIDEST
    outward = -value if key in LOWER else value
    return outward > WIDEST or outward <= -FARTHEST


def _bounds_nothing(key: str, value: Decimal, whole: bool) -> bool:
    """Return whether a bound is beyond the integers that the library counts to: its own holds."""
    beyond = WIDEST if key == "maximum" else WIDEST + 1
    return whole and key in UPPER and value >= beyond


def _inexact(place: str, value: Decimal, whole: bool = False) -> Iterator[str]:
    """Yield the problem of a number that would become another one.

    `whole` stands for bounds of integers, which are used as they are held, not as they are printed.
    """
    nearest = float(value)
    if not math.isfinite(nearest) or (nearest == 0 and value != 0):
        yield f"{place} is {_shown(value)}; such large or small numbers cannot be followed"
        return
    held = Decimal(nearest) if whole and nearest.is_integer() else Decimal(repr(nearest))
    if held != value:
        shown = int(nearest) if nearest.is_integer() and abs(nearest) < 10**18 else nearest
        yield f"{place} is {_shown(value)}; {HELD}, and the nearest one is {shown}"


def _steps(root: Any, path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problem of steps that hold together and whose common multiple is too large."""
    if "$ref" not in schema and "allOf" not in schema:
        return
    steps = set[Decimal]()
    for part in with_needed(root, schema):
        if isinstance(step := part.get("multipleOf"), Decimal) and step.is_finite() and step:
            steps.add(abs(step))
    if has_large_multiple(steps):
        yield f"{path or '/'} {LARGE_MULTIPLE}"


def has_large_multiple(steps: Collection[Decimal]) -> bool:
    """Return whether the common multiple of different steps is more than the library computes."""
    if len(steps) < 2:
        return False
    if max(steps) / min(steps) > MOST_OF_STEPS:
        return True
    unit = Decimal(1).scaleb(min(int(step.as_tuple().exponent) for step in steps))
    return math.lcm(*(int(step / unit) for step in steps)) >= MOST_OF_STEPS


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
            waiting += [(f"{place}/{escaped(name)}", v) for name, v in value.items()][::-1]


def _shown(value: Decimal) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# ---- references


def _loop(root: Any) -> str | None:
    """Return the path of a $ref that must be followed to follow itself, by $ref and allOf alone.

    A search in depth: a schema that is met again while its own needs are followed closes a loop.
    """
    done = set[int]()
    for path, start in schemas(root):
        open_ones = set[int]()
        waiting: list[tuple[str, Any, bool]] = [(path, start, False)]
        while waiting:
            place, schema, left = waiting.pop()
            if left:
                open_ones.discard(id(schema))
                done.add(id(schema))
            elif id(schema) in open_ones:
                return place
            elif id(schema) not in done and isinstance(schema, Mapping):
                open_ones.add(id(schema))
                waiting.append((place, schema, True))
                waiting += [(where, part, False) for where, part in needed(root, path, schema)]
    return None
