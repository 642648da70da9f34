"""Calls of Mistral's models.

As the chat templates of mistralai/Mistral-7B-Instruct-v0.3, Mistral-Nemo-Instruct-2407 and
Mistral-Small-3.1-24B-Instruct-2503 have it, all calls of an answer:

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 7, "b": 5}}]

and those of Mistral-Small-3.2-24B-Instruct-2506, Devstral and Ministral 3, once for each call, the
id left out by the last two:

    [TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 7, "b": 5}
"""

from collections.abc import Collection, Sequence

from jaxserve.chat.answers.call_grammar import CallContext, CallSyntax, literal
from jaxserve.chat.answers.events import BegunCall, Content, FoundCall, Parse
from jaxserve.chat.answers.incremental import NAME, SPACES, IncomingText
from jaxserve.chat.answers.json_text import call_in, elements, is_object
from jaxserve.chat.answers.object_calls import tell_call

OPEN = "[TOOL_CALLS]"
ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
MARKS = (OPEN, ID, ARGUMENTS)
KEY = "arguments"


def mistral(text: IncomingText, names: Collection[str]) -> Parse[None]:
    """Find calls of both kinds after OPEN; anything else is content."""
    while (yield from text.emit_until(Content, OPEN)):
        yield from text.read_while(SPACES)
        if (yield from text.attempt(_tell_listed(text, names))):
            continue
        if (yield from text.peek()) == "[":
            calls = yield from _listed(text, names)
        else:
            calls = yield from _named(text, names)
        if calls:
            yield from text.read_end()
            text.accept()
            yield from (call for call in calls if isinstance(call, FoundCall))
        else:
            yield from text.reject()


def _tell_listed(text: IncomingText, names: Collection[str]) -> Parse[bool]:
    """Tell the calls of an array while they are written; the result is false without a first one.

    What comes in place of another one is dropped, up to the end of the array.
    """
    if not (yield from text.read_literal("[")) or not (yield from tell_call(text, names, KEY)):
        return False
    yield from text.read_while(SPACES)
    while (yield from text.read_literal(",")):
        yield from text.read_while(SPACES)
        if not (yield from tell_call(text, names, KEY)):
            call = call_in((yield from text.read_json()), KEY, names)
            if call is None:
                break
            text.accept()
            yield call
        yield from text.read_while(SPACES)
    yield from text.drop_to("]")
    return True


def _listed(text: IncomingText, names: Collection[str]) -> Parse[list[FoundCall]]:
    """Read an array of calls; the result is empty where one is malformed."""
    calls: list[FoundCall] = []
    for element in elements((yield from text.read_json())):
        call = call_in(element, KEY, names)
        if call is None:
            return []
        calls.append(call)
    return calls


def _named(text: IncomingText, names: Collection[str]) -> Parse[Sequence[FoundCall | BegunCall]]:
    """Read one call whose name stands before its arguments; the result has at most one entry.

    A call that is certain is told meanwhile.
    """
    name = yield from text.read_while(NAME)
    if (yield from text.read_literal(ID)):
        yield from text.read_while(NAME)
    if not (name in names and (yield from text.read_literal(ARGUMENTS))):
        return []
    yield from text.read_while(SPACES)
    if text.certain and (yield from text.peek()) == "{":
        call = yield from text.begin_call(name)
        yield from text.tell_object()
        return [call]
    arguments = yield from text.read_json()
    return [FoundCall(name, arguments)] if is_object(arguments) else []


def _rest(context: CallContext) -> str:
    """Write the expression of the kind of calls that the vocabulary is made for.

    Models that write a call's name before its arguments have the special token ARGUMENTS.
    """
    if ARGUMENTS not in context.special:
        listed = context.joined(context.objects(KEY), literal(", "))
        return f'" "? {literal("[")} {listed} {literal("]")}'
    call = context.any_of(lambda name, rule: f"{literal(name)} {context.mark(ARGUMENTS)} {rule}")
    return context.joined(call, context.mark(OPEN))


SYNTAX = CallSyntax(OPEN, _rest)
