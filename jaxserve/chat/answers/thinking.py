"""Reasoning before the answer proper: DeepSeek-R1 and V3.1, Qwen3, QwQ.

    <think>
    7 plus 5 ...
    </think>

    It is 12.

An answer thinks if it begins with the mark, or if the template wrote the mark at the end of the
prompt (Qwen/QwQ-32B, deepseek-ai/DeepSeek-V3.1 in its thinking mode). Marks anywhere else are
content.
"""

from jaxserve.chat.answers.events import Content, Parse, Reasoning
from jaxserve.chat.answers.incremental import NEWLINES, SPACES, IncomingText

OPEN = "<think>"
CLOSE = "</think>"
MARKS = (OPEN, CLOSE)


def opened_by(prompt: str) -> bool:
    """Return whether the answer to this prompt begins inside of its reasoning."""
    return prompt.rstrip().endswith(OPEN)


def closed_by(prompt: str) -> bool:
    """Return whether the answer to this prompt begins behind its reasoning."""
    return prompt.rstrip().endswith(CLOSE)


def thinking(text: IncomingText, opened: bool) -> Parse[None]:
    """Split the text into reasoning, if it begins with that, and content.

    `opened` says that the prompt ends with OPEN; the answer may repeat it.
    """
    yield from text.read_while(SPACES)
    if (yield from text.read_literal(OPEN)) or opened:
        yield from text.read_while(SPACES)
        text.accept()
        yield from text.emit_until(Reasoning, CLOSE)
        yield from text.read_while(NEWLINES)
        text.accept()
    else:
        yield from text.reject()
    yield from text.emit_until(Content, None)
