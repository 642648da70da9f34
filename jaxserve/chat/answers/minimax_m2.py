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
from jaxserve.chat.answers.events import BegunCall, FoundCall, Parse
from jaxserve.chat.answers.incremental import NAME, SPACES, IncomingText
from jaxserve.chat.answers.parameter_grammar import ParameterSyntax
from jaxserve.chat.answers.parameters import Parameters, WrittenCall, read_value
from jaxserve.chat.answers.sections import Section

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
    """Find the calls of each section; see Section.find."""
    parameters = Parameters(functions)
    yield from Section(OPEN, CLOSE, INVOKE).find(text, lambda text: _call(text, parameters))


def _call(text: IncomingText, parameters: Parameters) -> Parse[BegunCall | FoundCall | None]:
    """Read one call after INVOKE; the result is None where it is malformed.

    A call that is certain is told meanwhile, as far as it is well-formed.
    """
    name = yield from text.read_while(NAME)
    if not (yield from text.read_literal(HEAD_END)) or name not in parameters:
        return None
    call = WrittenCall(text, parameters, name, INNER)
    yield from call.begin()
    yield from text.read_while(SPACES)
    while (yield from text.read_literal(PARAMETER)):
        key = yield from text.read_while(KEY)
        if not (yield from text.read_literal(HEAD_END)):
            return call.begun
        value = yield from read_value(text, PARAMETER_END, (PARAMETER, INVOKE_END))
        if value is None:
            return call.begun
        if not (yield from call.add(key, value)):
            return None
        yield from text.read_while(SPACES)
    if not (yield from text.read_literal(INVOKE_END)):
        return call.begun
    return (yield from call.end())


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
