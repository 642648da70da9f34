"""Calls of Hermes 2 and 3, Qwen2.5 and Qwen3.

As the chat templates of NousResearch/Hermes-3-Llama-3.1-8B ("tool_use") and Qwen/Qwen3-8B have it,
once for each call:

    <tool_call>
    {"name": "add", "arguments": {"a": 7, "b": 5}}
    </tool_call>
"""

from collections.abc import Collection

from jaxserve.chat.answers.call_grammar import CallContext, CallSyntax, literal
from jaxserve.chat.answers.events import Content, Parse
from jaxserve.chat.answers.incremental import SPACES, IncomingText
from jaxserve.chat.answers.json_text import call_in
from jaxserve.chat.answers.object_calls import tell_call

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MARKS = (OPEN, CLOSE)
KEY = "arguments"
NEWLINE = "\n"


def hermes(text: IncomingText, names: Collection[str]) -> Parse[None]:
    """Find calls between OPEN and CLOSE; anything else is content.

    The end of the text closes a call, too: CLOSE may be a stop string.
    """
    while (yield from text.emit_until(Content, OPEN)):
        yield from text.read_while(SPACES)
        if (yield from tell_call(text, names, KEY)):
            yield from text.drop_to(CLOSE)
            continue
        call = call_in((yield from text.read_json()), KEY, names)
        yield from text.read_while(SPACES)
        if call and ((yield from text.read_literal(CLOSE)) or (yield from text.read_end())):
            yield from text.read_end()
            text.accept()
            yield call
        else:
            yield from text.reject()


def _rest(context: CallContext) -> str:
    """Write the expression of calls, each on a line of its own."""
    newline = literal(NEWLINE)
    call = f"{newline} {context.objects(KEY)} {newline} {context.mark(CLOSE)}"
    return context.joined(call, f"{newline} {context.mark(OPEN)}")


SYNTAX = CallSyntax(OPEN, _rest)
