"""Fields of protobuf messages, whatever the service they belong to."""

from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve.chat.messages import MAX_MESSAGES
from jaxserve.errors import RequestError

MAX_ENTRIES = 10 * MAX_MESSAGES  # of all repeated messages of a request
MOST_UNKNOWN = 4096  # bytes of unknown fields that are looked at


def check_known(message: Message) -> None:
    """Check that no message of a request has a field of a later version.

    Such a field would otherwise be dropped in silence. Also bounds the entries of repeated
    messages. Raises RequestError.
    """
    inside = list(_Walk().messages(message, ""))
    unknown = _unknown_bytes(message)
    if unknown > MOST_UNKNOWN:  # protobuf would make an object of each before it gives the first
        problem = f"has {unknown} bytes of fields that this server does not know; remove them"
        raise RequestError("request", problem)
    if unknown:
        for found, path in inside:
            _check_fields(found, path)


def _unknown_bytes(message: Message) -> int:
    """Return the bytes of fields that the message's type does not have, at any depth."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return message.ByteSize() - known.ByteSize()


def _check_fields(message: Message, path: str) -> None:
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        raise RequestError(
            path or "request",
            f"has a field of number {unknown.field_number}, which this server does not know",
        )


class _Walk:
    """One walk through a request, within the bound on its entries."""

    def __init__(self) -> None:
        self._entries = 0

    def messages(self, message: Message, path: str) -> Iterator[tuple[Message, str]]:
        """Yield a message with its path, and the messages inside of it with theirs."""
        yield message, path
        for field, value in message.ListFields():
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            inside = f"{path}.{field.name}" if path else field.name
            if field.is_repeated:
                self._count(value, inside)
                for i, entry in enumerate(value):
                    yield from self.messages(entry, f"{inside}[{i}]")
            else:
                yield from self.messages(value, inside)

    def _count(self, entries: Sequence[Message], path: str) -> None:
        if len(entries) > MAX_MESSAGES:
            raise RequestError(path, f"has {len(entries)} entries; the limit is {MAX_MESSAGES}")
        self._entries += len(entries)
        if self._entries > MAX_ENTRIES:
            problem = f"and the lists before it have more than {MAX_ENTRIES} entries together"
            raise RequestError(path, problem)


def set_fields(message: Message) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each field that the client set; all others keep their defaults.

    Maps and repeated fields become dictionaries and lists; an empty one counts as not set.
    """
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield field.name, dict(value)
        elif field.is_repeated:
            yield field.name, list(value)
        else:
            yield field.name, value
