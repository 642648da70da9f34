"""Messages of conversations as plain JSON values, checked and within bounds."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.chat.bounds import MAX_DEPTH, MAX_DIGITS, MAX_MESSAGES
from jaxserve.errors import RequestError
from jaxserve.tokenizer import MARK

LEAST_TOO_LONG = 10**MAX_DIGITS  # of integers
OF_THE_MODEL = "assistant"  # role
OPTIONAL_STRINGS = ("name", "tool_call_id")  # fields of messages
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Message = Mapping[str, Any]


def plain_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """Return a copy of a conversation in plain values.

    Each message is an object with role and content, both strings, as are name and tool_call_id.
    Other fields (tool_calls, ...) are left to the template; fields that are None are left out, as
    templates expect. A message with tool_calls needs no content, which is None then, since some
    templates ask for it.
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
        if value is not None or key == "content"
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


def plain(value: object, path: str, depth: int = 0) -> Any:
    """Return a copy in plain JSON values.

    RequestError names the path of a value of another type, or of one that is nested more than
    MAX_DEPTH deep.
    """
    if depth > MAX_DEPTH:
        raise RequestError(path, f"is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return _integer(value, path)
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, Mapping):
        return {
            _key(key, path): plain(inner, f"{path}.{key}", depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(inner, f"{path}[{i}]", depth + 1) for i, inner in enumerate(value)]
    expected = "strings, numbers, true, false, null, lists and objects of them"
    raise RequestError(path, f"is {value!r:.80}; give {expected}")


def _integer(value: int, path: str) -> int:
    if abs(value) >= LEAST_TOO_LONG:
        raise RequestError(
            path, f"is an integer of {value.bit_length()} bits; the limit is {MAX_DIGITS} digits"
        )
    return value


def _key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise RequestError(path, f"has the key {key!r:.80}; keys must be strings")
    return _text(key, path)


def _text(text: str, path: str) -> str:
    """Return a valid Unicode text without MARK, whose meaning the client must not borrow."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            path, f"has half a surrogate pair at character {error.start}; send both halves"
        ) from None
    if MARK in text:
        raise RequestError(
            path, f"holds U+{ord(MARK):04X}, which is no character for interchange; remove it"
        )
    return str(text)  # subclasses of str become plain ones
