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
from jaxserve.chat.answers.events import Content, FoundCall, Parse
from jaxserve.chat.answers.incremental import NAME, SPACES, IncomingText
from jaxserve.chat.answers.json_text import is_object

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
    """Find the calls of each section; a section with a malformed call is content as a whole.

    The end of the text closes a section, too: END may be a stop string.
    """
    while (yield from text.emit_until(Content, BEGIN)):
        calls = yield from _calls(text, names)
        if calls and ((yield from text.read_literal(END)) or (yield from text.read_end())):
            yield from text.read_end()
            text.accept()
            yield from calls
        else:
            yield from text.reject()


def _calls(text: IncomingText, names: Collection[str]) -> Parse[list[FoundCall]]:
    """Read calls as long as they come; the result is empty where one is malformed."""
    calls: list[FoundCall] = []
    yield from text.read_while(SPACES)
    while (yield from text.read_literal(CALL_BEGIN)):
        call = yield from _call(text, names)
        if call is None:
            return []
        calls.append(call)
        yield from text.read_while(SPACES)
    return calls


def _call(text: IncomingText, names: Collection[str]) -> Parse[FoundCall | None]:
    """Read one call after its first mark; the result is None where it is malformed."""
    yield from text.read_while(SPACES)
    written = yield from text.read_while(NAME)
    if not (yield from text.read_literal(COLON)):
        return None
    number = yield from text.read_while(DIGITS)
    yield from text.read_while(SPACES)
    if not (yield from text.read_literal(ARGUMENTS)):
        return None
    yield from text.read_while(SPACES)
    arguments = "{}"  # models leave out those of functions without parameters
    if (yield from text.peek()) == "{":
        arguments = yield from text.read_json()
    yield from text.read_while(SPACES)
    is_closed = yield from text.read_literal(CALL_END)
    name = written if written in names else written.removeprefix(FUNCTIONS)
    if not (is_closed and number and name in names and is_object(arguments)):
        return None
    return FoundCall(name, arguments, f"{written}{COLON}{number}")


def _rest(context: CallContext) -> str:
    """Write the expression of a section's calls."""
    begin, arguments, end = map(context.mark, (CALL_BEGIN, ARGUMENTS, CALL_END))

    def call(name: str, rule: str) -> str:
        return f"{begin} {literal(f'{FUNCTIONS}{name}{COLON}')} {NUMBER} {arguments} {rule} {end}"

    return f"{context.joined(context.any_of(call), '')} {context.mark(END)}"


SYNTAX = CallSyntax(BEGIN, _rest)
