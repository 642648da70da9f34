"""Calls of GLM-4.5 and later.

As the chat templates of zai-org/GLM-4.5 and GLM-4.6 have it, once for each call:

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    <arg_key>days</arg_key>
    <arg_value>3</arg_value>
    </tool_call>

GLM-4.7 and GLM-5 leave out the line ends. Values are text, and the schema of the function tells
which are to be read as JSON.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxserve.chat.answers.call_grammar import CallContext, CallSyntax, literal
from jaxserve.chat.answers.events import BegunCall, Content, FoundCall, Parse
from jaxserve.chat.answers.incremental import NAME, SPACES, IncomingText
from jaxserve.chat.answers.parameter_grammar import ParameterSyntax
from jaxserve.chat.answers.parameters import Parameters, WrittenCall, read_value

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
MARKS = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
LONGEST_KEY = 256  # characters
NEWLINE = "\n"
INNER = re.compile(rf"{KEY}([^<>\n]*){KEY_END}")


def glm45(text: IncomingText, functions: Mapping[str, Mapping[str, Any]]) -> Parse[None]:
    """Find calls between OPEN and CLOSE; anything else is content.

    The end of the text closes a call, too: CLOSE may be a stop string.
    """
    parameters = Parameters(functions)
    while (yield from text.emit_until(Content, OPEN)):
        yield from text.read_while(SPACES)
        call = yield from _call(text, parameters)
        if isinstance(call, BegunCall):
            yield from text.drop_to(CLOSE)
            continue
        if call and ((yield from text.read_literal(CLOSE)) or (yield from text.read_end())):
            yield from text.read_end()
            text.accept()
            yield call
        else:
            yield from text.reject()


def _call(text: IncomingText, parameters: Parameters) -> Parse[BegunCall | FoundCall | None]:
    """Read a name and parameters up to CLOSE; the result is None where they are malformed.

    A call that is certain is told meanwhile, as far as it is well-formed.
    """
    name = yield from text.read_while(NAME)
    if name not in parameters:
        return None
    yield from text.read_while(SPACES)
    call = WrittenCall(text, parameters, name, INNER)
    if (yield from text.is_next(KEY)) or (yield from text.is_next(CLOSE)):
        yield from call.begin()
    while (yield from text.read_literal(KEY)):
        key = yield from text.read_until(KEY_END, LONGEST_KEY)
        yield from text.read_while(SPACES)
        if key is None or not (yield from text.read_literal(VALUE)):
            return call.begun
        value = yield from read_value(text, VALUE_END, (KEY, CLOSE))
        if value is None:
            return call.begun
        if not (yield from call.add(key.strip(), value)):
            return None
        yield from text.read_while(SPACES)
    if call.begun and not ((yield from text.is_next(CLOSE)) or (yield from text.read_end())):
        return call.begun
    return (yield from call.end())


def _rest(context: CallContext) -> str:
    """Write the expression of calls, with or without line ends: models differ."""
    newline = f"{literal(NEWLINE)}?"

    def call(name: str, rule: str) -> str:
        return f"{literal(name)} {newline} {rule} {context.mark(CLOSE)}"

    return context.joined(context.any_of(call), f"{newline} {context.mark(OPEN)}")


def _opening(context: CallContext, key: str) -> str:
    return (
        f"{context.mark(KEY)} {key} {context.mark(KEY_END)} {literal(NEWLINE)}? "
        f"{context.mark(VALUE)}"
    )


PARAMETERS = ParameterSyntax(
    _opening,
    key=rf"[^<\s](?:[^<]{{0,{LONGEST_KEY - 2}}}[^<\s])?",
    closing=VALUE_END,
    margin="",
    after=f"{literal(NEWLINE)}?",
)
SYNTAX = CallSyntax(OPEN, _rest, arguments=PARAMETERS.rules)
