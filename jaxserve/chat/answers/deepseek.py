"""Calls of DeepSeek's models, whose bars and underlines are U+FF5C and U+2581.

As the chat templates of deepseek-ai/DeepSeek-V2.5, DeepSeek-V3 and DeepSeek-R1 have it, all calls
of an answer:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
    ```json
    {"a": 7, "b": 5}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>...<｜tool▁call▁end｜><｜tool▁calls▁end｜>

and that of deepseek-ai/DeepSeek-V3.1, with shorter calls:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 7, "b":
    5}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from collections.abc import Collection

from jaxserve.chat.answers.call_grammar import CallContext, CallSyntax, literal
from jaxserve.chat.answers.events import BegunCall, FoundCall, Parse
from jaxserve.chat.answers.incremental import NAME, SPACES, IncomingText
from jaxserve.chat.answers.json_text import is_object
from jaxserve.chat.answers.sections import Section

BEGIN = "<｜tool▁calls▁begin｜>"
END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
SEPARATOR = "<｜tool▁sep｜>"
CALL_END = "<｜tool▁call▁end｜>"
MARKS = (BEGIN, END, CALL_BEGIN, SEPARATOR, CALL_END)
TYPE = "function"
FENCE = "```json"
FENCE_END = "```"
NEWLINE = "\n"


def deepseek(text: IncomingText, names: Collection[str]) -> Parse[None]:
    """Find the calls of each section; see Section.find."""
    yield from Section(BEGIN, END, CALL_BEGIN).find(text, lambda text: _call(text, names))


def _call(text: IncomingText, names: Collection[str]) -> Parse[BegunCall | FoundCall | None]:
    """Read one call after its first mark; the result is None where it is malformed.

    A call that is certain is told meanwhile.
    """
    name = yield from text.read_while(NAME)
    if not (yield from text.read_literal(SEPARATOR)):
        return None
    fenced = name == TYPE and (yield from text.peek()) != "{"
    if fenced:
        name = yield from text.read_while(NAME)
        yield from text.read_while(SPACES)
        if not (yield from text.read_literal(FENCE)):
            return None
    yield from text.read_while(SPACES)
    if text.certain and name in names and (yield from text.peek()) == "{":
        call = yield from text.begin_call(name)
        yield from text.tell_object()
        yield from text.drop_to(CALL_END)
        return call
    arguments = yield from text.read_json()
    yield from text.read_while(SPACES)
    if fenced and not (yield from text.read_literal(FENCE_END)):
        return None
    is_closed = yield from text.read_literal(CALL_END)
    is_call = is_closed and name in names and is_object(arguments)
    return FoundCall(name, arguments) if is_call else None


def _rest(context: CallContext) -> str:
    """Write the expression of calls in both formats; which one the model writes is not known."""
    begin, separator, end = map(context.mark, (CALL_BEGIN, SEPARATOR, CALL_END))

    def call(name: str, rule: str) -> str:
        fenced = (
            f"{literal(TYPE)} {separator} {literal(f'{name}\n{FENCE}\n')} {rule} "
            f"{literal(f'\n{FENCE_END}')}"
        )
        return f"{begin} ({fenced} | {literal(name)} {separator} {rule}) {end}"

    return f"{context.joined(context.any_of(call), f'{literal(NEWLINE)}?')} {context.mark(END)}"


SYNTAX = CallSyntax(BEGIN, _rest)
