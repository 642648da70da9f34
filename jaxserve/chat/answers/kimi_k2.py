"""Calls of Kimi-K2 and K2.5.

As the chat template of moonshotai/Kimi-K2-Instruct has it, all calls of an answer, on one line:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0
    <|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>
    <|tool_call_begin|>...<|tool_call_end|><|tool_calls_section_end|>

The name with its number is the call's id. The template writes ids into the history, and not names.
"""

import re
from collections.abc import Collection

from jaxserve.chat.answers.call_grammar import CallContext, CallSyntax, literal
from jaxserve.chat.answers.events import BegunCall, FoundCall, Parse
from jaxserve.chat.answers.incremental import NAME, SPACES, IncomingText
from jaxserve.chat.answers.json_text import is_object
from jaxserve.chat.answers.sections import Section

BEGIN = "<|tool_calls_section_begin|>"
END = "<|tool_calls_section_end|>"
CALL_BEGIN = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
MARKS = (BEGIN, END, CALL_BEGIN, ARGUMENTS, CALL_END)
FUNCTIONS = "functions."
COLON = ":"
DIGITS = re.compile(r"[0-9]*")
NUMBER = "/[0-9]{1,6}/"  # bounded, or a model could go on with digits and nothing else


def kimi_k2(text: IncomingText, names: Collection[str]) -> Parse[None]:
    """Find the calls of each section; see Section.find."""
    yield from Section(BEGIN, END, CALL_BEGIN).find(text, lambda text: _call(text, names))


def _call(text: IncomingText, names: Collection[str]) -> Parse[BegunCall | FoundCall | None]:
    """Read one call after its first mark; the result is None where it is malformed.

    A call that is certain is told meanwhile.
    """
    yield from text.read_while(SPACES)
    written = yield from text.read_while(NAME)
    if not (yield from text.read_literal(COLON)):
        return None
    number = yield from text.read_while(DIGITS)
    yield from text.read_while(SPACES)
    if not (yield from text.read_literal(ARGUMENTS)):
        return None
    yield from text.read_while(SPACES)
    name = written if written in names else written.removeprefix(FUNCTIONS)
    id = f"{written}{COLON}{number}"
    begins = (yield from text.peek()) == "{"
    if text.certain and number and name in names and begins:
        call = yield from text.begin_call(name, id)
        yield from text.tell_object()
        yield from text.drop_to(CALL_END)
        return call
    arguments = "{}"  # models leave out those of functions without parameters
    if begins:
        arguments = yield from text.read_json()
    yield from text.read_while(SPACES)
    is_closed = yield from text.read_literal(CALL_END)
    if not (is_closed and number and name in names and is_object(arguments)):
        return None
    return FoundCall(name, arguments, id)


def _rest(context: CallContext) -> str:
    """Write the expression of a section's calls."""
    begin, arguments, end = map(context.mark, (CALL_BEGIN, ARGUMENTS, CALL_END))

    def call(name: str, rule: str) -> str:
        return f"{begin} {literal(f'{FUNCTIONS}{name}{COLON}')} {NUMBER} {arguments} {rule} {end}"

    return f"{context.joined(context.any_of(call), '')} {context.mark(END)}"


SYNTAX = CallSyntax(BEGIN, _rest)
