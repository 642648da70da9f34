"""JSON from models and clients: within bounds before it is parsed, and never rewritten."""

import json
import re
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from jaxserve.chat.answers.events import FoundCall
from jaxserve.chat.bounds import MAX_DIGITS, MAX_TEXT_DEPTH

STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
SPACES = re.compile(r"[ \t\r\n]*")


class BeyondBoundsError(ValueError):
    """JSON is nested too deep, or has an integer of too many digits."""


def parse(text: str) -> Any:
    """Parse JSON text.

    ValueError is raised for other text, NaN and Infinity, deep nesting and long integers. The depth
    is counted before parsing, which recurses: MAX_TEXT_DEPTH is far below Python's limit.
    """
    depth = 0
    for found in STRING_OR_BRACKET.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth > MAX_TEXT_DEPTH:
            raise BeyondBoundsError(f"is nested more than {MAX_TEXT_DEPTH} deep")
    return _loads(text)


def call_in(text: str, key: str, names: Collection[str]) -> FoundCall | None:
    """Return {"name": ..., key: {...}} as a call of one of the names; None for anything else.

    Some models add "type" or "id"; no other member is allowed. Arguments stay as they are written.
    The caller has bounded the depth of the text.
    """
    members = _members(text)
    if members is None or not {"name", key} <= members.keys() <= {"name", key, "type", "id"}:
        return None
    name = json.loads(members["name"])
    if not (isinstance(name, str) and name in names and members[key].startswith("{")):
        return None
    return FoundCall(name, members[key])


def is_object(text: str) -> bool:
    """Return whether the text, whose depth the caller has bounded, is a JSON object."""
    return _members(text) is not None


def is_bounded_object(text: str) -> bool:
    """Return whether any text is a JSON object that is nested no deeper than MAX_TEXT_DEPTH."""
    try:
        parse(text)
    except ValueError:
        return False
    return is_object(text)


def elements(text: str) -> list[str]:
    """Return the texts of an array's elements; none where the text is no array.

    The caller has bounded the depth of the text.
    """
    try:
        parsed = _loads(text)
    except ValueError:
        return []
    if not isinstance(parsed, list):
        return []
    found = []
    at = 1  # after the bracket
    for _ in parsed:
        value, at = _value(text, at)
        found.append(value)
        at += 1  # the comma
    return found


def _members(text: str) -> dict[str, str] | None:
    """Return the texts of an object's values by name; None for a non-object or a repeated name."""
    try:
        pairs = _loads(text, object_pairs_hook=tuple)
    except ValueError:
        return None
    if not text.startswith("{"):
        return None
    found: dict[str, str] = {}
    at = 1  # after the brace
    for name, _ in pairs:
        _, at = _value(text, at)
        found[name], at = _value(text, at + 1)  # past the colon
        at += 1  # the comma
    return found if len(found) == len(pairs) else None


def _value(text: str, at: int) -> tuple[str, int]:
    """Return the text of the value at `at`, and the position of the next comma, colon or bracket.

    The text is valid JSON.
    """
    start = _past_spaces(text, at)
    _, end = json.JSONDecoder().raw_decode(text, start)
    return text[start:end], _past_spaces(text, end)


def _past_spaces(text: str, at: int) -> int:
    """Return the first position from `at` on that has no white space."""
    found = SPACES.match(text, at)
    assert found
    return found.end()


def _loads(text: str, object_pairs_hook: Callable[[Any], Any] | None = None) -> Any:
    """Parse JSON text within the bounds of numbers; its depth has been bounded."""
    return json.loads(
        text, parse_constant=_refuse, parse_int=_integer, object_pairs_hook=object_pairs_hook
    )


def _integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > MAX_DIGITS:
        raise BeyondBoundsError(f"has an integer of more than {MAX_DIGITS} digits")
    return int(digits)


def _refuse(constant: str) -> NoReturn:
    """Raise ValueError for NaN, Infinity and -Infinity, which Python's parser lets through."""
    raise ValueError(f"{constant} is no JSON number")
