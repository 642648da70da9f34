"""Forms of a conversation for templates that take turns in one order only.

Published templates raise an error where two messages of one role follow each other, where the
system speaks anywhere but at the beginning (or at all), or where the user speaks behind the result
of a call, and agents send such conversations. Other templates leave such messages out.
"""

from collections.abc import Collection, Iterator
from typing import Any

from jaxserve.chat.answers.thinking import CLOSE
from jaxserve.chat.messages import OF_THE_MODEL

SYSTEM = "system"
DEVELOPER = "developer"  # OpenAI's newer name of the system's role
USER = "user"
TOOL = "tool"
OF_THE_OPERATOR = frozenset({SYSTEM, DEVELOPER})
BETWEEN = "\n\n"

Turns = list[dict[str, Any]]


def forms(messages: Turns, named: Collection[str] = ()) -> Iterator[Turns]:
    """Yield the messages as they are, and then in forms that more and more templates take.

    1. As they are.
    2. Neighbours of one role are one message, with an empty line between their texts.
    3. As 2, and what the system says behind the first turn is said by the user.
    4. As 3, and what the user says behind the result of a call is the end of the result.
    5. As 3, and what the system says at the beginning is said by the user.
    6. As 4, likewise.

    Args:
        messages: Plain messages.
        named: Fields that the template reads: a message that has one beside role and content is
            not joined to another.
    """
    yield messages
    seen = [messages]
    opening = _opening(messages)
    # How many messages of the system may stay its own, and whether results are extended.
    steps = [(len(messages), False), (opening, False), (opening, True), (0, False), (0, True)]
    for kept, behind_results in steps:
        turns = [*messages[:kept], *map(_said_by_user, messages[kept:])]
        form = _joined(turns, named, behind_results)
        if form not in seen:
            yield form
        seen.append(form)


def _opening(messages: Turns) -> int:
    """Return how many messages of the system a conversation begins with."""
    for count, message in enumerate(messages):
        if message["role"] not in OF_THE_OPERATOR:
            return count
    return len(messages)


def _said_by_user(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": USER} if message["role"] in OF_THE_OPERATOR else message


def _joined(messages: Turns, named: Collection[str], behind_results: bool) -> Turns:
    """Return the messages with neighbours joined to one."""
    groups: list[Turns] = []
    for message in messages:
        if groups and _may_join(groups[-1], message, named, behind_results):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_one(group) for group in groups]


def _may_join(
    group: Turns, message: dict[str, Any], named: Collection[str], behind_results: bool
) -> bool:
    """Return whether a message may become the end of those that stand before it."""
    first = group[0]
    if not _has_text_alone(message, named):
        return False
    if behind_results and first["role"] == TOOL and message["role"] == USER:
        return first["content"] is not None
    if not _has_text_alone(first, named):
        return False
    if first["role"] == OF_THE_MODEL and CLOSE in message["content"]:
        return False  # templates take all that stands before it for thoughts
    if first["role"] in OF_THE_OPERATOR:
        return message["role"] in OF_THE_OPERATOR
    return first["role"] == message["role"] in (USER, OF_THE_MODEL)


def _has_text_alone(message: dict[str, Any], named: Collection[str]) -> bool:
    """Return whether a message has a text and nothing else that the template reads."""
    others = message.keys() - {"role", "content"}
    return message["content"] is not None and not others.intersection(named)


def _one(group: Turns) -> dict[str, Any]:
    """Return one message with the texts of several; empty ones leave no empty line."""
    if len(group) == 1:
        return group[0]
    texts = [message["content"] for message in group]
    return group[0] | {"content": BETWEEN.join(text for text in texts if text.strip())}
