"""JSON schemas inside of a grammar in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

# Texts, expressions and comments of a grammar, and marks behind which a schema follows.
TOKEN: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<mark>%json\s*)')


@dataclass(frozen=True)
class Embedded:
    """A schema, and where it stands in the grammar."""

    schema: Any
    start: int  # of its text, in characters
    end: int
    line: int  # of its %json, from 1


def embedded_schemas(text: str, decoder: json.JSONDecoder) -> Iterator[Embedded]:
    """Yield the schemas of a grammar; what is no schema there is left to the library."""
    place = 0
    while token := TOKEN.search(text, place):
        place = token.end()
        if token["mark"] is None:
            continue
        try:
            schema, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        if isinstance(schema, dict | bool):
            yield Embedded(schema, token.end(), place, 1 + text.count("\n", 0, token.start()))
