"""What a model thinks before it answers: DeepSeek-R1 and V3.1, Qwen3, QwQ.

    <think>
    7 plus 5 ...
    </think>

    It is 12.

An answer thinks if it begins with the mark, or if the template wrote the mark at the end of the
prompt (Qwen/QwQ-32B, deepseek-ai/DeepSeek-V3.1 in its thinking mode). Marks anywhere else are
content.
"""

from jaxserve.chat.answers.events import Content, Reasoning, Steps
from jaxserve.chat.answers.incremental import NEWLINES, SPACES, Incoming

OPEN, CLOSE = "<think>", "</think>"
MARKS = (OPEN, CLOSE)


def opened_by(prompt: str) -> bool:
    """Whether the answer to this prompt begins inside of the thought."""
    return prompt.rstrip().endswith(OPEN)


def thinking(text: Incoming, opened: bool) -> Steps[None]:
    yield from text.run(SPACES)
    if (yield from text.literal(OPEN)) or opened:
        yield from text.run(SPACES)
        text.accept()
        yield from text.pass_on(Reasoning, CLOSE)
        yield from text.run(NEWLINES)
        text.accept()
    else:
        yield from text.give_back()
    yield from text.pass_on(Content, None)
