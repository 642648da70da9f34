"""Search for messages whose text a chat template leaves out of the prompt."""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jaxserve.chat.answers.thinking import CLOSE
from jaxserve.chat.messages import OF_THE_MODEL
from jaxserve.errors import ChatError
from jaxserve.tokenizer import MARK

# Letters of a text that stands in a prompt only because somebody says it, and not by chance.
LONG = 16
LARGEST_KEY = 10**9  # of the numbers that tell the marks of a search from all others

Message = Mapping[str, Any]


class Said(NamedTuple):
    """Text that a message has to leave in the prompt, without white space around it."""

    index: int  # of the message
    field: str  # key of its content, which may have marks against tokens' names itself
    begin: int  # of the text in the content
    text: str


def left_out(
    messages: Sequence[Message],
    shown: Sequence[Message],
    text: str,
    render: Callable[[Sequence[Message]], str],
) -> int | None:
    """Return the index of the first message that left no trace in a rendered text; None if all did.

    A part of a text is a trace, as templates may cut thoughts or shorten results. Nobody misses
    messages without a text, those with calls, and what an assistant thought before it spoke.

    Args:
        messages: Plain messages.
        shown: Messages as the template got them, with marks in names of tokens.
        text: What the template made of them.
        render: Function that renders other messages likewise. Where it fails, nothing is missed: a
            template may take some texts only.
    """
    said = list(_said(messages, shown))
    if _stand_in_order(said, text):
        return None
    key = secrets.randbelow(LARGEST_KEY)
    try:
        marked = render(_with_marks(shown, said, key))
    except ChatError:
        return None
    found = set(map(int, re.findall(f"{MARK}{key}-([0-9]+){MARK}", marked)))
    return next((each.index for each in said if each.index not in found), None)


def _said(messages: Sequence[Message], shown: Sequence[Message]) -> Iterator[Said]:
    for index, (plain, marked) in enumerate(zip(messages, shown, strict=True)):
        field = list(marked)[list(plain).index("content")]
        content = marked[field] or ""
        begin = 0
        if plain["role"] == OF_THE_MODEL and CLOSE in content:
            begin = content.rindex(CLOSE) + len(CLOSE)
        text = content[begin:].strip()
        if text.replace(MARK, "") and not plain.get("tool_calls"):
            yield Said(index, field, content.index(text, begin), text)


def _stand_in_order(said: Sequence[Said], text: str) -> bool:
    """Return whether the texts stand in another one after each other, and none of them by chance.

    That spares most conversations of agents, which are long, a second rendering.
    """
    at = 0
    for each in said:
        at = text.find(each.text, at) if len(each.text) >= LONG else -1
        if at < 0:
            return False
        at += len(each.text)
    return True


def _with_marks(shown: Sequence[Message], said: Sequence[Said], key: int) -> list[Message]:
    """Return the messages with marks inside of each text.

    Templates look at both ends of a text, and remove white space there.
    """
    marked = list(shown)
    for index, field, begin, text in said:
        mark = f"{MARK}{key}-{index}{MARK}"
        content = shown[index][field]
        places = sorted({len(text) * share // 4 for share in (1, 2, 3)} | {len(text) - 1})
        cuts = [0, *(begin + max(1, place) for place in places), len(content)]
        parts = [content[a:b] for a, b in pairwise(cuts)]
        marked[index] = {**shown[index], field: mark.join(parts)}
    return marked
