"""Texts of schemas and grammars, as the grammar library takes them."""

import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from jaxserve.structure.schemas.check import problem_of
from jaxserve.structure.schemas.control_characters import (
    check_control_characters,
    has_open_names,
)
from jaxserve.structure.schemas.embedded import embedded_schemas
from jaxserve.structure.schemas.errors import SchemaError
from jaxserve.structure.schemas.exact import exact
from jaxserve.structure.schemas.formats import check_formats
from jaxserve.structure.schemas.number_ranges import check_ranges
from jaxserve.structure.schemas.rewriting import rewritten

OPTIONS: Final = "x-guidance"  # keyword of the library's options for one schema
# Letters that may follow a backslash, with and without \u.
ESCAPES: Final = "json_allowed_escapes"
ALL_ESCAPES: Final = 'nrbtf"\\u'
SHORT_ESCAPES: Final = 'nrbtf"\\'


def as_the_library_takes_it(kind: str, text: str, options: Mapping[str, Any]) -> str:
    """Return a structure's text with its schemas rewritten, and the library's options in them.

    Args:
        kind: Kind of the Structure.
        text: Text of the Structure.
        options: Options of the library for JSON. A schema inside of a grammar may have others.

    Raises:
        ValueError: A schema cannot be followed.
    """
    match kind:
        case "json_object":
            return _schema('{"type": "object"}', options)
        case "json_schema":
            return _schema(text, options)
        case "lark":
            return _grammar(text, options)
    return text


def _schema(text: str, options: Mapping[str, Any]) -> str:
    if problem := problem_of("json_schema", text):
        raise ValueError(problem)
    try:
        schema = _decoder().decode(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("nests too deep") from None
    if not isinstance(schema, dict | bool):
        raise SchemaError("", f"is {schema!r:.80}; a schema is an object, true or false")
    if isinstance(schema, dict):
        schema.pop(OPTIONS, None)
    return _with_options(schema, options)


def _grammar(text: str, options: Mapping[str, Any]) -> str:
    if problem := problem_of("lark", text):
        raise ValueError(problem)
    parts = []
    place = 0
    for embedded in embedded_schemas(text, _decoder()):
        try:
            written = _with_options(embedded.schema, options)
        except ValueError as error:
            raise ValueError(f"the schema in line {embedded.line}: {error}") from None
        parts += [text[place : embedded.start], written]
        place = embedded.end
    return "".join([*parts, text[place:]])


def _with_options(schema: Any, options: Mapping[str, Any]) -> str:
    """Return the text of a schema as rewritten, with the library's options inside of it."""
    try:
        check_formats(schema)
        plain = exact(schema)
        found = rewritten(plain)
    except RecursionError:
        raise SchemaError("", "nests too deep") from None
    is_open = has_open_names(schema) or has_open_names(found)
    check_control_characters(schema, in_values=is_open)
    if found is False:
        raise SchemaError("", "allows no value at all, so that no text follows it")
    if found is True:
        found = {}
    check_ranges(found)
    if found is not plain and (problem := problem_of("json_schema", json.dumps(found))):
        raise ValueError(f"written without 'not', 'if' and 'oneOf', {problem}")
    escapes = SHORT_ESCAPES if is_open else ALL_ESCAPES
    own = found.pop(OPTIONS, {ESCAPES: escapes, **options})
    # The library takes its options out, and puts the last keyword in their place: they come last.
    return json.dumps({**found, OPTIONS: own})


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_float=_number)


def _number(text: str) -> float:
    """Return a number, as an integer where it is one: the library takes no count of 2.0.

    Only annotations may have numbers beyond those of 64 bits here, which become the largest one.
    """
    number = max(-sys.float_info.max, min(float(text), sys.float_info.max))
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
