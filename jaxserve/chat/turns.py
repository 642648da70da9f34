"""Forms of a conversation for templates that take turns in one order only.

Published templates raise an error where two messages of one role follow each other, or where the
system speaks anywhere but at the beginning (or at all), and agents send such conversations. Other
templates leave such messages out.
"""

from collections.abc import Iterator
from typing import Any

SYSTEM = "system"
USER = "user"
JOINED = frozenset({SYSTEM, USER, "assistant"})  # roles whose neighbours may become one message
FIELDS = frozenset({"role", "content"})  # of messages that may be joined: nothing else is lost
BETWEEN = "\n\n"

Turns = list[dict[str, Any]]


def forms(messages: Turns) -> Iterator[Turns]:
    """Yield the messages as they are, and then in forms that more and more templates take.

    1. As they are.
    2. Neighbours of one role are one message, with an empty line between their texts.
    3. Also, what the system says behind the first turn is a part of the user's turn there.
    4. Also, what it says before that is a part of the user's first turn.
    """
    last = messages
    yield messages
    opening = _opening(messages)
    for first in (len(messages), opening, 0):
        form = _joined([*messages[:first], *map(_as_user, messages[first:])])
        if form != last:
            yield form
        last = form


def _opening(messages: Turns) -> int:
    """Return how many messages of the system a conversation begins with."""
    for count, message in enumerate(messages):
        if message["role"] != SYSTEM:
            return count
    return len(messages)


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": USER} if message["role"] == SYSTEM else message


def _joined(messages: Turns) -> Turns:
    """Return the messages with neighbours of one role joined to one."""
    found: Turns = []
    for message in messages:
        if found and _may_join(found[-1], message):
            text = BETWEEN.join((found[-1]["content"], message["content"]))
            found[-1] = found[-1] | {"content": text}
        else:
            found.append(message)
    return found


def _may_join(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        one["role"] == other["role"]
        and one["role"] in JOINED
        and one.keys() == other.keys() == FIELDS
        and one["content"] is not None
        and other["content"] is not None
    )
