"""JSON that somebody else wrote: bounded in depth before it is parsed, and never rewritten."""

import json
import re
from collections.abc import Collection
from typing import Any, NoReturn

from jaxserve.chat.answers.events import Found

MAX_DEPTH = 24  # of objects and arrays in JSON text: what is parsed recursively
STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
SPACES = re.compile(r"[ \t\r\n]*")


def parse(text: str) -> Any:
    """ValueError for what is not JSON, NaN and Infinity among it, and for what is nested more than
    MAX_DEPTH deep.
    """
    depth = 0
    for found in STRING_OR_BRACKET.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested more than {MAX_DEPTH} deep")
    return json.loads(text, parse_constant=_refuse)


def call_in(text: str, key: str, names: Collection[str]) -> Found | None:
    """{"name": ..., key: {...}} as a call of one of the names; None for anything else. text: not
    too deep.

    Some models add "type" or "id", and no other member is allowed. Arguments stay as they are
    written.
    """
    members = _members(text)
    if members is None or not {"name", key} <= members.keys() <= {"name", key, "type", "id"}:
        return None
    name = json.loads(members["name"])
    if not (isinstance(name, str) and name in names and members[key].startswith("{")):
        return None
    return Found(name, members[key])


def is_object(text: str) -> bool:
    """text: not too deep."""
    return _members(text) is not None


def elements(text: str) -> list[str]:
    """The texts of an array's elements; none where it is no array. text: not too deep."""
    try:
        parsed = json.loads(text, parse_constant=_refuse)
    except ValueError:
        return []
    if not isinstance(parsed, list):
        return []
    found, at = [], 1
    for _ in parsed:
        value, at = _value(text, at)
        found.append(value)
        at += 1  # the comma
    return found


def _members(text: str) -> dict[str, str] | None:
    """The texts of an object's values by name; None where it is no object, or has a name twice."""
    try:
        pairs = json.loads(text, parse_constant=_refuse, object_pairs_hook=tuple)
    except ValueError:
        return None
    if not text.startswith("{"):
        return None
    found, at = dict[str, str](), 1
    for name, _ in pairs:
        _, at = _value(text, at)
        found[name], at = _value(text, at + 1)  # past the colon
        at += 1  # the comma
    return found if len(found) == len(pairs) else None


def _value(text: str, at: int) -> tuple[str, int]:
    """The text of the value from here on, and where the next comma, colon or bracket stands. text:
    valid JSON.
    """
    start = _past_spaces(text, at)
    _, end = json.JSONDecoder().raw_decode(text, start)
    return text[start:end], _past_spaces(text, end)


def _past_spaces(text: str, at: int) -> int:
    found = SPACES.match(text, at)
    assert found
    return found.end()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
