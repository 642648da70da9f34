"""Calls of Mistral's models.

As the chat templates of mistralai/Mistral-7B-Instruct-v0.3, Mistral-Nemo-Instruct-2407 and
Mistral-Small-3.1-24B-Instruct-2503 have it, all calls of an answer:

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 7, "b": 5}}]

and those of Mistral-Small-3.2-24B-Instruct-2506, Devstral and Ministral 3, once for each call, the
id left out by the last two:

    [TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 7, "b": 5}
"""

from collections.abc import Collection

from jaxserve.chat.answers.call_grammar import Calling, Writing, literal
from jaxserve.chat.answers.events import Content, Found, Steps
from jaxserve.chat.answers.incremental import NAME, SPACES, Incoming
from jaxserve.chat.answers.json_text import call_in, elements, is_object

OPEN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKS = (OPEN, ID, ARGUMENTS)


def mistral(text: Incoming, names: Collection[str]) -> Steps[None]:
    while (yield from text.pass_on(Content, OPEN)):
        yield from text.run(SPACES)
        if (yield from text.peek()) == "[":
            calls = yield from _listed(text, names)
        else:
            calls = yield from _named(text, names)
        if calls:
            yield from text.ends()
            text.accept()
            yield from calls
        else:
            yield from text.give_back()


def _listed(text: Incoming, names: Collection[str]) -> Steps[list[Found]]:
    calls = [call_in(element, "arguments", names) for element in elements((yield from text.json()))]
    return [] if None in calls else [call for call in calls if call]


def _named(text: Incoming, names: Collection[str]) -> Steps[list[Found]]:
    name = yield from text.run(NAME)
    if (yield from text.literal(ID)):
        yield from text.run(NAME)
    if not (name in names and (yield from text.literal(ARGUMENTS))):
        return []
    yield from text.run(SPACES)
    arguments = yield from text.json()
    return [Found(name, arguments)] if is_object(arguments) else []


def _rest(calling: Calling) -> str:
    """As the vocabulary tells: models that write a call's name before its arguments have a token
    between them.
    """
    if ARGUMENTS not in calling.special:
        listed = calling.joined(calling.objects("arguments"), literal(", "))
        return f'" "? {literal("[")} {listed} {literal("]")}'
    call = calling.any_of(lambda name, rule: f"{literal(name)} {calling.mark(ARGUMENTS)} {rule}")
    return calling.joined(call, calling.mark(OPEN))


WRITING = Writing(OPEN, _rest)
