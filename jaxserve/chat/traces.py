"""Search for messages whose text a chat template leaves out of the prompt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.chat.answers.thinking import CLOSE
from jaxserve.chat.messages import OF_THE_MODEL
from jaxserve.errors import ChatError
from jaxserve.tokenizer import MARK

# Letters of a text that stands in a prompt only because somebody says it, and not by chance.
LONG = 16

Message = Mapping[str, Any]


class Said(NamedTuple):
    """Text that a message has to leave in the prompt, without white space around it."""

    index: int  # of the message
    begin: int  # of the text in its content
    text: str


def left_out(
    messages: Sequence[Message], text: str, render: Callable[[Sequence[Message]], str]
) -> int | None:
    """Return the index of the first message that left no trace in a rendered text; None if all did.

    Args:
        messages: Messages as the template got them. Nobody misses those without a text, those with
            calls, and what an assistant thought before it spoke.
        text: What the template made of them.
        render: Function that renders other messages likewise.
    """
    said = list(_said(messages))
    if _stand_in_order(said, text):
        return None
    try:
        marked = render(_with_marks(messages, said))
    except ChatError:  # the template judges what is said: nobody can tell
        return None
    return next((each.index for each in said if _mark(each.index) not in marked), None)


def _said(messages: Sequence[Message]) -> Iterator[Said]:
    for index, message in enumerate(messages):
        content = message["content"] or ""
        begin = 0
        if message["role"] == OF_THE_MODEL and CLOSE in content:
            begin = content.rindex(CLOSE) + len(CLOSE)
        text = content[begin:].strip()
        if text and not message.get("tool_calls"):
            yield Said(index, content.index(text, begin), text)


def _stand_in_order(said: Sequence[Said], text: str) -> bool:
    """Return whether the texts stand in another one after each other, and none of them by chance.

    That spares most conversations of agents, which are long, a second rendering.
    """
    at = 0
    for each in said:
        at = text.find(each.text, at)
        if at < 0 or len(each.text) < LONG:
            return False
        at += len(each.text)
    return True


def _with_marks(messages: Sequence[Message], said: Sequence[Said]) -> list[Message]:
    """Return the messages with a mark in the middle of each text.

    Templates look at both ends of a text, and remove white space there.
    """
    marked = list(messages)
    for index, begin, text in said:
        content = messages[index]["content"]
        middle = begin + (len(text) + 1) // 2
        with_mark = content[:middle] + _mark(index) + content[middle:]
        marked[index] = {**messages[index], "content": with_mark}
    return marked


def _mark(index: int) -> str:
    """Return a mark that no client can write, nor the marks in names of tokens make."""
    return f"{MARK * 3}{index}{MARK}"
