"""Messages of conversations as plain JSON values, checked and within bounds."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.chat.bounds import MAX_DEPTH, MAX_DIGITS, MAX_MESSAGES
from jaxserve.errors import RequestError
from jaxserve.tokenizer import MARK

LEAST_TOO_LONG = 10**MAX_DIGITS  # of integers
OF_THE_MODEL = "assistant"  # role
LISTS = frozenset({"tool_calls", "annotations"})  # that may be empty in what servers answer
OPTIONAL_STRINGS = ("name", "tool_call_id")  # fields of messages
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_KEY = 80  # characters of a key in the path of an error

Message = Mapping[str, Any]


def plain_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """Return a copy of a conversation in plain values.

    Each message is an object with role and content, both strings, as are name and tool_call_id.
    Other fields (tool_calls, ...) are left to the template; fields that are None are left out, as
    templates expect, and so are empty lists of calls: templates ask whether the field is there. A
    message with tool_calls needs no content, which is None then, since some templates ask for it.
    RequestError names the path of the first thing that is wrong.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(name, f"is {messages!r:.80}; give a list of messages")
    if not messages:
        raise RequestError(name, "is empty; give at least one message")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(name, f"has {len(messages)} messages; the limit is {MAX_MESSAGES}")
    return [_message(message, f"{name}[{i}]") for i, message in enumerate(messages)]


def _message(message: object, path: str) -> dict[str, Any]:
    """Return one message in plain values; raise RequestError for a malformed one."""
    if not isinstance(message, Mapping):
        raise RequestError(path, f"is {message!r:.80}; give an object with role and content")
    _require_string(message, "role", path)
    if not (message.get("tool_calls") and message.get("content") is None):
        _require_string(message, "content", path)
    else:
        message = {"role": message["role"], "content": None, **message}
    for field in OPTIONAL_STRINGS:
        if message.get(field) is not None:
            _require_string(message, field, path)
    if message["role"] == OF_THE_MODEL:
        message = settled(message)
    return {
        key: value
        for key, value in plain(message, path).items()
        if key == "content" or not (value is None or (key in LISTS and value == []))
    }


def _require_string(message: Mapping[Any, Any], field: str, path: str) -> None:
    """Raise RequestError unless the message has a string in this field."""
    if field not in message:
        raise RequestError(f"{path}.{field}", "is missing; it must be a string")
    if not isinstance(message[field], str):
        raise RequestError(f"{path}.{field}", f"is {message[field]!r:.80}; it must be a string")


def settled(value: Any, depth: int = 0) -> Any:
    """Return JSON values of the model with a replacement for what no request may have in texts.

    A model may write MARK, and halves of surrogate pairs as escapes in the arguments of a call. The
    client is not to blame for them when the answer is a part of its history.
    """
    if isinstance(value, str):
        halves = value.encode("utf-16", "surrogatepass")
        return halves.decode("utf-16", "replace").replace(MARK, REPLACEMENT)
    if depth > MAX_DEPTH:  # refused by `plain`
        return value
    if isinstance(value, Mapping):
        return {settled(key): settled(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [settled(inner, depth + 1) for inner in value]
    return value


def plain(value: object, path: str) -> Any:
    """Return a copy in plain JSON values.

    RequestError names the path of a value of another type, or of one that is nested more than
    MAX_DEPTH deep.
    """
    return _plain(value, Place(path), 0)


class Place(NamedTuple):
    """Place of a value in a request; its path is put together only for an error.

    A client chooses how long its keys are, and how many values each of them has.
    """

    inside: "str | Place"  # the whole request's path, or the place of the list or object around
    key: str | int | None = None

    def __str__(self) -> str:
        match self.key:
            case None:
                return str(self.inside)
            case int():
                return f"{self.inside}[{self.key}]"
            case _:
                return f"{self.inside}.{self.key:.{LONGEST_KEY}}"


def _plain(value: object, place: Place, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise RequestError(str(place), f"is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return _integer(value, place)
    if isinstance(value, str):
        return _text(value, place)
    if isinstance(value, Mapping):
        return {
            _key(key, place): _plain(inner, Place(place, key), depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(inner, Place(place, i), depth + 1) for i, inner in enumerate(value)]
    expected = "strings, numbers, true, false, null, lists and objects of them"
    raise RequestError(str(place), f"is {value!r:.80}; give {expected}")


def _integer(value: int, place: Place) -> int:
    if abs(value) >= LEAST_TOO_LONG:
        problem = f"is an integer of {value.bit_length()} bits; the limit is {MAX_DIGITS} digits"
        raise RequestError(str(place), problem)
    return value


def _key(key: object, place: Place) -> str:
    if not isinstance(key, str):
        raise RequestError(str(place), f"has the key {key!r:.80}; keys must be strings")
    return _text(key, place)


def _text(text: str, place: Place) -> str:
    """Return a valid Unicode text without MARK, whose meaning the client must not borrow."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            str(place), f"has half a surrogate pair at character {error.start}; send both halves"
        ) from None
    if MARK in text:
        raise RequestError(
            str(place), f"holds U+{ord(MARK):04X}, which is no character for interchange; remove it"
        )
    return str(text)  # subclasses of str become plain ones
