"""Fields of protobuf messages, whatever the service they belong to."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve.chat.messages import MAX_MESSAGES
from jaxserve.errors import RequestError


def check_known(message: Message, path: str = "") -> None:
    """Check that the message at `path` of a request has no field of a later version.

    Such a field would otherwise be dropped in silence. Also bounds the entries of repeated
    messages. Raises RequestError.
    """
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        raise RequestError(
            path or "request",
            f"has a field of number {unknown.field_number}, which this server does not know",
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        inside = f"{path}.{field.name}" if path else field.name
        if not field.is_repeated:
            check_known(value, inside)
            continue
        if len(value) > MAX_MESSAGES:
            raise RequestError(inside, f"has {len(value)} entries; the limit is {MAX_MESSAGES}")
        for i, entry in enumerate(value):
            check_known(entry, f"{inside}[{i}]")


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
