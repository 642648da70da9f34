"""Calls of Llama 3.1, 3.2 and 3.3.

As the chat template of meta-llama/Llama-3.1-8B-Instruct has it, an answer that is a call, and
nothing else:

    {"name": "add", "parameters": {"a": 7, "b": 5}}

Models put <|python_tag|> before it at times, after a sentence or two as well, and write several
calls with a semicolon between them. The calls of built-in tools,
<|python_tag|>brave_search.call(query="..."), are content: nobody here can offer such tools.
"""

from collections.abc import Collection

from jaxserve.chat.answers.call_grammar import Writing, literal
from jaxserve.chat.answers.events import Content, Found, Steps
from jaxserve.chat.answers.incremental import SPACES, Incoming
from jaxserve.chat.answers.json_text import call_in

TAG = "<|python_tag|>"
MARKS = (TAG,)
KEYS = (
    "parameters",
    "arguments",
)  # the second one is what some models took over from the tools' own form


def llama(text: Incoming, names: Collection[str]) -> Steps[None]:
    yield from text.run(SPACES)
    yield from text.literal(TAG)
    yield from _calls(text, names)
    while (yield from text.pass_on(Content, TAG)):
        yield from _calls(text, names)


def _calls(text: Incoming, names: Collection[str]) -> Steps[None]:
    """What comes, if all of it up to the end is calls; content otherwise."""
    found: list[Found] = []
    while True:
        yield from text.run(SPACES)
        written = yield from text.json()
        call = next((call for key in KEYS if (call := call_in(written, key, names))), None)
        if call is None:
            return (yield from text.give_back())
        found.append(call)
        if (yield from text.ends()):
            text.accept()
            return (yield from found)
        yield from text.run(SPACES)
        if not (yield from text.literal(";")):
            return (yield from text.give_back())


WRITING = Writing("", lambda calling: calling.joined(calling.objects("parameters"), literal("; ")))
