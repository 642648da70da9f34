"""Answers of gpt-oss in OpenAI's Harmony format: messages, each in a channel.

    <|channel|>analysis<|message|>The user wants a sum.<|end|><|start|>assistant<|channel|>
    commentary to=functions.add <|constrain|>json<|message|>{"a": 7, "b": 5}<|call|>

and an answer without calls:

    <|channel|>analysis<|message|>7 plus 5 ...<|end|><|start|>assistant<|channel|>final<|message|>It
    is 12.<|return|>

The prompt ends with <|start|>assistant, and <|call|> and <|return|> end the answer. The recipient
may stand before the channel as well. See docs/format.md of github.com/openai/harmony.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from jaxserve.chat.answers.call_grammar import ANY_TEXT, CallContext, CallSyntax, Lead, literal
from jaxserve.chat.answers.events import BegunCall, Content, FoundCall, Parse, Reasoning
from jaxserve.chat.answers.incremental import NAME, SPACE, SPACES, IncomingText
from jaxserve.chat.answers.json_text import is_bounded_object
from jaxserve.chat.answers.thought_grammar import other_tokens

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END)
ANALYSIS = "analysis"
COMMENTARY = "commentary"
FINAL = "final"
ROLE = "assistant"
FUNCTIONS = "functions."
LONGEST_HEADER = 256  # characters
RECIPIENT = re.compile(r"\bto=([\w.-]+)", re.ASCII)
IN_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)", re.ASCII)
EMPTY_LINE = "\n\n"  # between two messages of a kind


@dataclass(frozen=True)
class Header:
    """Header of a message, which stands before its text."""

    channel: str  # empty where none is named
    recipient: str  # without "functions."; empty for a message to the user


type Kind = type[Content] | type[Reasoning]


def harmony(text: IncomingText, names: Collection[str], thoughts: Kind = Reasoning) -> Parse[None]:
    """Tell the messages of an answer apart: thoughts, calls, and text.

    A message in the channel of thoughts is one, unless it calls one of the names. All others
    without a recipient are content. A call that is malformed, or to nobody that is known, is
    content with its header, as is all that follows what is no message.
    """
    said = set[Kind]()
    while (yield from text.peek()):
        header = yield from _header(text)
        if header is None:
            yield from text.emit_until(Content, None)
            return
        call = None
        if header.recipient in names:
            call = yield from _call(text, header.recipient)
        if call:
            text.accept()
            if isinstance(call, FoundCall):
                yield call
        elif header.channel == ANALYSIS and header.recipient not in names:
            text.accept()
            yield from _message(text, thoughts, said)
        elif header.recipient:
            if header.recipient not in names:
                yield from text.read_to(END)
            yield from text.reject()
        else:
            text.accept()
            yield from _message(text, Content, said)
        if (yield from text.read_end()):
            text.accept()


def _header(text: IncomingText) -> Parse[Header | None]:
    """Read a header with the mark behind it; the result is None where there is none."""
    if (yield from text.read_literal(START)):
        yield from text.read_while(NAME)
    if (yield from text.peek()) not in ("<", " "):
        return None
    found = yield from text.read_until(MESSAGE, LONGEST_HEADER)
    if found is None or END in found:
        return None
    channel = IN_CHANNEL.search(found)
    recipient = RECIPIENT.search(found)
    return Header(
        channel[1] if channel else "",
        recipient[1].removeprefix(FUNCTIONS) if recipient else "",
    )


def _call(text: IncomingText, name: str) -> Parse[BegunCall | FoundCall | None]:
    """Read the arguments of a call and the end of its message; None where they are malformed.

    A call that is certain is told meanwhile.
    """
    if text.certain:
        yield from text.read_while(SPACES)
        if (yield from text.peek()) == "{":
            call = yield from text.begin_call(name)
            yield from text.tell_object()
            yield from text.drop_to(END)
            return call
    body = yield from text.read_to(END)
    arguments = body.strip(SPACE) or "{}"  # models leave out those of functions without parameters
    return FoundCall(name, arguments) if is_bounded_object(arguments) else None


def _message(text: IncomingText, kind: Kind, said: set[Kind]) -> Parse[None]:
    """Emit a message to its end, behind an empty line if one of its kind was there before."""
    is_next = kind in said
    for part in text.emit_until(kind, END):
        if part is not None:
            if is_next:
                yield kind(EMPTY_LINE)
            is_next = False
            said.add(kind)
        yield part
    text.accept()


# ---- grammars


def before_calls(context: CallContext) -> Lead:
    """Return the lead of an answer that may begin with thoughts."""
    opening, message, end, start = map(context.mark, (CHANNEL, MESSAGE, END, START))
    thought = f"{opening} {literal(ANALYSIS)} {message} text {end} {start} {literal(ROLE)}"
    return Lead(f"({thought})*", (_text(context),))


def _text(context: CallContext) -> str:
    """Write the rule of a message's text, which a budget may cut inside of a character."""
    if END in context.special:
        return f"text: {other_tokens(context)}*"
    return f"text: {ANY_TEXT}"


def before_text(context: CallContext) -> Lead:
    """Return the lead of an answer up to the text of its last message."""
    lead = before_calls(context)
    header = f"{context.mark(CHANNEL)} {literal(FINAL)} {context.mark(MESSAGE)}"
    return Lead(f"{lead.expression} {header}", lead.rules)


def _calls(context: CallContext) -> str:
    """Write the expression of a call, its recipient before the channel or behind it."""
    kind = f"({context.mark(CONSTRAIN)} {literal('json')} | {literal('json')})"

    def call(name: str, rule: str) -> str:
        behind = f"{context.mark(CHANNEL)} {literal(f'{COMMENTARY} to={FUNCTIONS}{name} ')}"
        recipient = literal(f" to={FUNCTIONS}{name}")
        before = f"{recipient} {context.mark(CHANNEL)} {literal(f'{COMMENTARY} ')}"
        return f"({behind} | {before}) {kind} {context.mark(MESSAGE)} {rule}"

    return context.any_of(call)


def _strict(context: CallContext) -> str:
    """Write the rules of an answer of messages, of which each call follows its schema."""
    opening, message, end, start = map(context.mark, (CHANNEL, MESSAGE, END, START))
    channels = " | ".join(map(literal, (ANALYSIS, COMMENTARY, FINAL)))
    rule = f"message: {opening} ({channels}) {message} text | {_calls(context)}"
    begin = f"start: message ({end} {start} {literal(ROLE)} message)*"
    return "\n".join([begin, rule, _text(context)])


SYNTAX = CallSyntax("", _calls, _strict)
