"""Calls of Qwen3-Coder, Qwen3.5 and later, and Nemotron 3.

As the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct has it, once for each call:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    3
    </parameter>
    </function>
    </tool_call>

Values are text, and the schema of the function tells which are to be read as JSON.
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
MARKS = (OPEN, CLOSE)
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
HEAD_END = ">"
NEWLINE = "\n"
KEY = re.compile(r"[^>\n]*")
INNER = re.compile(rf"^{PARAMETER}([^<>\n]*)>", re.MULTILINE)


def qwen3_coder(text: IncomingText, functions: Mapping[str, Mapping[str, Any]]) -> Parse[None]:
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
        yield from text.read_while(SPACES)
        if call and ((yield from text.read_literal(CLOSE)) or (yield from text.read_end())):
            yield from text.read_end()
            text.accept()
            yield call
        else:
            yield from text.reject()


def _call(text: IncomingText, parameters: Parameters) -> Parse[BegunCall | FoundCall | None]:
    """Read one function with its parameters; the result is None where it is malformed.

    A call that is certain is told meanwhile, as far as it is well-formed.
    """
    if not (yield from text.read_literal(FUNCTION)):
        return None
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
        value = yield from read_value(text, PARAMETER_END, (PARAMETER, FUNCTION_END))
        if value is None:
            return call.begun
        value = value.removeprefix(NEWLINE).removesuffix(NEWLINE)
        if not (yield from call.add(key, value)):
            return None
        yield from text.read_while(SPACES)
    if not (yield from text.read_literal(FUNCTION_END)):
        return call.begun
    return (yield from call.end())


def _rest(context: CallContext) -> str:
    """Write the expression of calls, each on lines of its own."""
    newline = literal(NEWLINE)

    def call(name: str, rule: str) -> str:
        head = literal(f"{NEWLINE}{FUNCTION}{name}{HEAD_END}{NEWLINE}")
        return f"{head} {rule} {literal(FUNCTION_END + NEWLINE)} {context.mark(CLOSE)}"

    return context.joined(context.any_of(call), f"{newline} {context.mark(OPEN)}")


def _opening(context: CallContext, key: str) -> str:
    return f"{literal(PARAMETER)} {key} {literal(HEAD_END + NEWLINE)}"


PARAMETERS = ParameterSyntax(
    _opening, key=r"[^>\n]+", closing=PARAMETER_END, margin=NEWLINE, after=literal(NEWLINE)
)
SYNTAX = CallSyntax(OPEN, _rest, arguments=PARAMETERS.rules)
