"""Calls of Llama 3.1, 3.2 and 3.3.

As the chat template of meta-llama/Llama-3.1-8B-Instruct has it, an answer that is a call, and
nothing else:

    {"name": "add", "parameters": {"a": 7, "b": 5}}

Models put <|python_tag|> before it at times, after a sentence or two as well, and write several
calls with a semicolon between them. The calls of built-in tools,
<|python_tag|>brave_search.call(query="..."), are content: nobody here can offer such tools.
"""

from collections.abc import Collection

from jaxserve.chat.answers.call_grammar import CallSyntax, literal
from jaxserve.chat.answers.events import Content, FoundCall, Parse
from jaxserve.chat.answers.incremental import SPACES, IncomingText
from jaxserve.chat.answers.json_text import call_in
from jaxserve.chat.answers.object_calls import tell_call

TAG = "<|python_tag|>"
MARKS = (TAG,)
# Some models write "arguments", the word of the tools in their prompt, against the template.
KEYS = ("parameters", "arguments")
BETWEEN = ";"


def llama(text: IncomingText, names: Collection[str]) -> Parse[None]:
    """Find an answer that is calls as a whole, or calls after a TAG; anything else is content."""
    yield from text.read_while(SPACES)
    yield from text.read_literal(TAG)
    yield from _calls(text, names)
    while (yield from text.emit_until(Content, TAG)):
        yield from _calls(text, names)


def _calls(text: IncomingText, names: Collection[str]) -> Parse[None]:
    """Find calls up to the end of the text; all of it is content where anything else comes.

    Calls that are certain are told one by one, and are none of that content.
    """
    yield from text.read_while(SPACES)
    while (yield from tell_call(text, names, *KEYS)):
        yield from text.read_while(SPACES)
        yield from text.read_literal(BETWEEN)
        yield from text.read_while(SPACES)
        text.accept()
    found: list[FoundCall] = []
    while True:
        yield from text.read_while(SPACES)
        written = yield from text.read_json()
        call = next((call for key in KEYS if (call := call_in(written, key, names))), None)
        if call is None:
            return (yield from text.reject())
        found.append(call)
        if (yield from text.read_end()):
            text.accept()
            return (yield from found)
        yield from text.read_while(SPACES)
        if not (yield from text.read_literal(BETWEEN)):
            return (yield from text.reject())


SYNTAX = CallSyntax(
    "", lambda context: context.joined(context.objects("parameters"), literal(f"{BETWEEN} "))
)
