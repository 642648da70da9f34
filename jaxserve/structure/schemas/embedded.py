"""JSON schemas inside of a grammar in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

MARK: Final = re.compile(r"%json\s*")  # a schema follows


@dataclass(frozen=True)
class Embedded:
    """A schema, and where it stands in the grammar."""

    schema: Any
    start: int  # of its text, in characters
    end: int
    line: int  # of its %json, from 1


def embedded_schemas(text: str, decoder: json.JSONDecoder) -> Iterator[Embedded]:
    """Yield the schemas of a grammar; what only looks like one, as in a comment, is passed over."""
    place = 0
    while mark := MARK.search(text, place):
        place = mark.end()
        try:
            schema, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        yield Embedded(schema, mark.end(), place, 1 + text.count("\n", 0, mark.start()))
