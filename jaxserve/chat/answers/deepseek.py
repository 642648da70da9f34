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

from jaxserve.chat.answers.call_grammar import Calling, Writing, literal
from jaxserve.chat.answers.events import Content, Found, Steps
from jaxserve.chat.answers.incremental import NAME, SPACES, Incoming
from jaxserve.chat.answers.json_text import is_object

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKS = (BEGIN, END, CALL_BEGIN, SEPARATOR, CALL_END)
TYPE, FENCE, FENCE_END = "function", "```json", "```"
NEWLINE = "\n"


def deepseek(text: Incoming, names: Collection[str]) -> Steps[None]:
    """All calls of a section, or none: it is content when one of them is malformed. The end of the
    text closes it.
    """
    while (yield from text.pass_on(Content, BEGIN)):
        calls = yield from _calls(text, names)
        if calls and ((yield from text.literal(END)) or (yield from text.ends())):
            yield from text.ends()
            text.accept()
            yield from calls
        else:
            yield from text.give_back()


def _calls(text: Incoming, names: Collection[str]) -> Steps[list[Found]]:
    """Up to what is no call any more; none where one is malformed."""
    calls: list[Found] = []
    yield from text.run(SPACES)
    while (yield from text.literal(CALL_BEGIN)):
        call = yield from _call(text, names)
        if call is None:
            return []
        calls.append(call)
        yield from text.run(SPACES)
    return calls


def _call(text: Incoming, names: Collection[str]) -> Steps[Found | None]:
    """From behind its first mark."""
    name = yield from text.run(NAME)
    if not (yield from text.literal(SEPARATOR)):
        return None
    fenced = name == TYPE and (yield from text.peek()) != "{"
    if fenced:
        name = yield from text.run(NAME)
        yield from text.run(SPACES)
        if not (yield from text.literal(FENCE)):
            return None
    yield from text.run(SPACES)
    arguments = yield from text.json()
    yield from text.run(SPACES)
    if fenced and not (yield from text.literal(FENCE_END)):
        return None
    if not (yield from text.literal(CALL_END)) or name not in names or not is_object(arguments):
        return None
    return Found(name, arguments)


def _rest(calling: Calling) -> str:
    """Of both kinds: the model knows its own."""
    begin, separator, end = map(calling.mark, (CALL_BEGIN, SEPARATOR, CALL_END))

    def call(name: str, rule: str) -> str:
        fenced = (
            f"{literal(TYPE)} {separator} {literal(f'{name}\n{FENCE}\n')} {rule} "
            f"{literal(f'\n{FENCE_END}')}"
        )
        return f"{begin} ({fenced} | {literal(name)} {separator} {rule}) {end}"

    return f"{calling.joined(calling.any_of(call), f'{literal(NEWLINE)}?')} {calling.mark(END)}"


WRITING = Writing(BEGIN, _rest)
