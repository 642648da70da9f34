"""Calls of Hermes 2 and 3, Qwen2.5 and Qwen3.

As the chat templates of NousResearch/Hermes-3-Llama-3.1-8B ("tool_use") and Qwen/Qwen3-8B have it,
once for each call:

    <tool_call>
    {"name": "add", "arguments": {"a": 7, "b": 5}}
    </tool_call>
"""

from collections.abc import Collection

from jaxserve.chat.answers.call_grammar import Calling, Writing, literal
from jaxserve.chat.answers.events import Content, Steps
from jaxserve.chat.answers.incremental import SPACES, Incoming
from jaxserve.chat.answers.json_text import call_in

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKS = (OPEN, CLOSE)
NEWLINE = "\n"


def hermes(text: Incoming, names: Collection[str]) -> Steps[None]:
    """The end of the text closes a call, too: CLOSE may be a stop string."""
    while (yield from text.pass_on(Content, OPEN)):
        yield from text.run(SPACES)
        call = call_in((yield from text.json()), "arguments", names)
        yield from text.run(SPACES)
        if call and ((yield from text.literal(CLOSE)) or (yield from text.ends())):
            yield from text.ends()
            text.accept()
            yield call
        else:
            yield from text.give_back()


def _rest(calling: Calling) -> str:
    newline, opening, closing = literal(NEWLINE), calling.mark(OPEN), calling.mark(CLOSE)
    call = f"{newline} {calling.objects('arguments')} {newline} {closing}"
    return calling.joined(call, f"{newline} {opening}")


WRITING = Writing(OPEN, _rest)
