"""Calls of MiniMax-M2 and later.

As the chat template of MiniMaxAI/MiniMax-M2 has it, all calls of an answer:

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    <parameter name="days">3</parameter>
    </invoke>
    </minimax:tool_call>

Values are text, and the schema of the function tells which are to be read as JSON.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxserve.chat.answers.call_grammar import CallContext, CallSyntax, literal
from jaxserve.chat.answers.events import Content, FoundCall, Parse
from jaxserve.chat.answers.incremental import NAME, SPACES, IncomingText
from jaxserve.chat.answers.parameter_grammar import ParameterSyntax
from jaxserve.chat.answers.parameters import Parameters, holds_another, read_value

OPEN = "<minimax:tool_call>"
CLOSE = "</minimax:tool_call>"
MARKS = (OPEN, CLOSE)
INVOKE = '<invoke name="'
INVOKE_END = "</invoke>"
PARAMETER = '<parameter name="'
PARAMETER_END = "</parameter>"
HEAD_END = '">'
NEWLINE = "\n"
KEY = re.compile(r'[^"\n]*')
INNER = re.compile(rf'{PARAMETER}([^<>"\n]*)">')


def minimax_m2(text: IncomingText, functions: Mapping[str, Mapping[str, Any]]) -> Parse[None]:
    """Find the calls of each section; a section with a malformed call is content as a whole.

    The end of the text closes a section, too: CLOSE may be a stop string.
    """
    parameters = Parameters(functions)
    while (yield from text.emit_until(Content, OPEN)):
        calls = yield from _calls(text, parameters)
        if calls and ((yield from text.read_literal(CLOSE)) or (yield from text.read_end())):
            yield from text.read_end()
            text.accept()
            yield from calls
        else:
            yield from text.reject()


def _calls(text: IncomingText, parameters: Parameters) -> Parse[list[FoundCall]]:
    """Read calls as long as they come; the result is empty where one is malformed."""
    calls: list[FoundCall] = []
    yield from text.read_while(SPACES)
    while (yield from text.read_literal(INVOKE)):
        call = yield from _call(text, parameters)
        if call is None:
            return []
        calls.append(call)
        yield from text.read_while(SPACES)
    return calls


def _call(text: IncomingText, parameters: Parameters) -> Parse[FoundCall | None]:
    """Read one call after INVOKE; the result is None where it is malformed."""
    name = yield from text.read_while(NAME)
    if not (yield from text.read_literal(HEAD_END)) or name not in parameters:
        return None
    written: list[tuple[str, str]] = []
    yield from text.read_while(SPACES)
    while (yield from text.read_literal(PARAMETER)):
        key = yield from text.read_while(KEY)
        if not (yield from text.read_literal(HEAD_END)):
            return None
        value = yield from read_value(text, PARAMETER_END, (PARAMETER, INVOKE_END))
        if value is None or holds_another(value, INNER, parameters.of(name), written):
            return None
        written.append((key, value))
        yield from text.read_while(SPACES)
    if not (yield from text.read_literal(INVOKE_END)):
        return None
    arguments = parameters.arguments(name, written)
    return None if arguments is None else FoundCall(name, arguments)


def _rest(context: CallContext) -> str:
    """Write the expression of a section's calls."""

    def call(name: str, rule: str) -> str:
        head = literal(f"{INVOKE}{name}{HEAD_END}{NEWLINE}")
        return f"{head} {rule} {literal(INVOKE_END + NEWLINE)}"

    calls = context.joined(context.any_of(call), "")
    return f"{literal(NEWLINE)} {calls} {context.mark(CLOSE)}"


def _opening(context: CallContext, key: str) -> str:
    return f"{literal(PARAMETER)} {key} {literal(HEAD_END)}"


PARAMETERS = ParameterSyntax(
    _opening, key=r'[^"\n]+', closing=PARAMETER_END, margin="", after=literal(NEWLINE)
)
SYNTAX = CallSyntax(OPEN, _rest, arguments=PARAMETERS.rules)
