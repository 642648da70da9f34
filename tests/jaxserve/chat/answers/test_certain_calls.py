"""Calls that a grammar makes well-formed: they are told while they are written."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.chat.answers import AnswerParser, Arguments, Call, Content, Part, Reading, Reasoning
from jaxserve.chat.answers.call_grammar import CallContext, calls_alone
from jaxserve.chat.answers.formats import TOOL_FORMATS
from jaxserve.chat.bounds import MAX_DIGITS, MAX_TEXT_DEPTH
from jaxserve.structure import Structure
from jaxserve.structure.grammars import Grammars
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.chat.answers.test_answers import (
    AS_TEXT,
    FUNCTIONS,
    GOLDEN,
    case_reading,
    expected,
    parts_of,
    reading_of,
)
from tests.jaxserve.server.http.scripted_model import members

END = 257  # token


@dataclass(frozen=True)
class Kind:
    """A way of writing calls: an answer is opening, calls with `between` in between, and closing.

    `call` writes a call from a name and the JSON text of its arguments.
    """

    form: str
    call: Callable[[str, str], str]
    opening: str = ""
    between: str = ""
    closing: str = ""
    marks: tuple[str, ...] = ()  # special tokens that the grammar needs to write this kind

    def answer(self, *calls: tuple[str, str]) -> str:
        written = [self.call(name, arguments) for name, arguments in calls]
        return f"{self.opening}{self.between.join(written)}{self.closing}"


def filled(template: str) -> Callable[[str, str], str]:
    return lambda name, arguments: template.replace("NAME", name).replace("{}", arguments)


def one_by_one(call: str, member: str) -> Callable[[str, str], str]:
    def write(name: str, arguments: str) -> str:
        return call.replace("NAME", name) % "".join(member % each for each in _texts(arguments))

    return write


def _texts(arguments: str) -> Iterator[tuple[str, str]]:
    for name, text in members(arguments):
        yield name, json.loads(text) if text.startswith('"') else text


KINDS = {
    "hermes": Kind(
        "hermes",
        filled('<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'),
        between="\n",
    ),
    "llama": Kind("llama", filled('{"name": "NAME", "parameters": {}}'), between="; "),
    "mistral": Kind("mistral", filled("[TOOL_CALLS]NAME[ARGS]{}"), marks=("[ARGS]",)),
    "mistral, listed": Kind(
        "mistral",
        filled('{"name": "NAME", "arguments": {}}'),
        *("[TOOL_CALLS] [", ", ", "]"),
    ),
    "deepseek": Kind(
        "deepseek",
        filled(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{}\n```<｜tool▁call▁end｜>"
        ),
        *("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek, short": Kind(
        "deepseek",
        filled("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        *("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    ),
    "harmony": Kind(
        "harmony",
        filled("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}"),
        between="<|end|><|start|>assistant",
    ),
    "qwen3_coder": Kind(
        "qwen3_coder",
        one_by_one(
            "<tool_call>\n<function=NAME>\n%s</function>\n</tool_call>",
            "<parameter=%s>\n%s\n</parameter>\n",
        ),
        between="\n",
    ),
    "glm45": Kind(
        "glm45",
        one_by_one(
            "<tool_call>NAME\n%s</tool_call>",
            "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n",
        ),
        between="\n",
    ),
    "minimax_m2": Kind(
        "minimax_m2",
        one_by_one('<invoke name="NAME">\n%s</invoke>\n', '<parameter name="%s">%s</parameter>\n'),
        *("<minimax:tool_call>\n", "", "</minimax:tool_call>"),
    ),
    "kimi_k2": Kind(
        "kimi_k2",
        filled(
            "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        ),
        *("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    ),
}
AS_JSON = [name for name, kind in KINDS.items() if kind.form not in AS_TEXT]
SUM = ("add", '{"a": 7, "b": 5}')
MANY = (
    "types",
    r'{"str": "a \"}{\\\" b\n </tool_call> é", "list": [1, {"x": "]"}], "int": 3, "bool": true}',
)
CALLS = (SUM, ("get.time-now", "{}"), MANY)
WITH_CALLS = [case for case in GOLDEN if any(part[0] == "call" for part in case["parts"])]


def certain(form: str, parallel: bool = True) -> Reading:
    return replace(reading_of(form, parallel=parallel), certain=True)


def told(reading: Reading, pieces: Sequence[str]) -> list[Part]:
    """Return the parts of an answer that comes in pieces, with those of a call's arguments joined.

    No piece of arguments is empty.
    """
    joined: list[Part] = []
    for part in parts_of(reading, pieces):
        last = joined[-1] if joined else None
        assert not isinstance(part, Arguments) or part.text
        if isinstance(part, Arguments) and isinstance(last, Arguments):
            assert part.index == last.index
            joined[-1] = Arguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined


def calls_of(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Return names and arguments of the calls among joined parts."""
    arguments = {part.index: part.text for part in parts if isinstance(part, Arguments)}
    return [(part.name, arguments.get(part.index, "")) for part in parts if isinstance(part, Call)]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with closing(Grammars(ByteTokenizer(), (END,), 258)) as compiler:
        yield compiler


def tokens_of(kind: Kind, text: str) -> list[int]:
    """Return the tokens of an answer, with one for its special mark, and END."""
    tokens: list[int] = []
    for part in text.split(kind.marks[0]) if kind.marks else [text]:
        tokens += [*([ByteTokenizer.bos_id] if tokens else []), *part.encode()]
    return [*tokens, END]


@pytest.mark.parametrize("name", list(KINDS))
def test_a_grammar_has_calls_as_they_are_written_here(name: str, grammars: Grammars) -> None:
    """The other tests show how the answers are told that a grammar allows."""
    kind = KINDS[name]
    special = dict.fromkeys(kind.marks, ByteTokenizer.bos_id)
    context = CallContext([call for call, _ in CALLS], kind.form != "harmony", special)
    grammar = calls_alone(TOOL_FORMATS[kind.form].syntax, context, [{}] * len(CALLS))
    for calls in [[call] for call in CALLS] if kind.form == "harmony" else [CALLS]:
        tokens = tokens_of(kind, kind.answer(*calls))
        matcher = grammars.compile(Structure("lark", grammar, "tools")).matcher()
        assert matcher.fits(tokens) == len(tokens)


@pytest.mark.parametrize(
    "case",
    WITH_CALLS,
    ids=lambda case: f"{case['form']}: {case['name']}",
)
def test_well_formed_calls_are_told_alike(case: dict[str, Any]) -> None:
    text = case["text"]
    reading = replace(case_reading(case), certain=True)
    parts = expected(case)
    assert told(reading, [text]) == parts
    assert told(reading, list(text)) == parts
    for at in range(len(text) + 1):
        assert told(reading, [text[:at], text[at:]]) == parts, at


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if case in WITH_CALLS else [])
        for case in GOLDEN  # those with calls are cut above
    ],
    ids=lambda case: f"{case['form']}: {case['name']}",
)
def test_malformed_calls_are_told_alike_however_they_are_cut(case: dict[str, Any]) -> None:
    text = case["text"]
    reading = replace(case_reading(case), certain=True)
    parts = told(reading, [text])
    assert told(reading, list(text)) == parts
    for at in range(len(text) + 1):
        assert told(reading, [text[:at], text[at:]]) == parts, at


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab"\\{}[]<>\n é', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
SOME_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["types", "add"]),
        st.dictionaries(st.sampled_from(["a", "b", "int", "str", "obj", "list", "any"]), VALUES),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", list(KINDS))
@given(calls=SOME_CALLS, parallel=st.booleans(), data=st.data())
@settings(max_examples=25)
def test_any_calls_are_told_alike(
    name: str, calls: list[tuple[str, dict[str, Any]]], parallel: bool, data: st.DataObject
) -> None:
    kind = KINDS[name]
    text = kind.answer(*((function, json.dumps(given)) for function, given in calls))
    held = parts_of(reading_of(kind.form, parallel=parallel), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    reading = certain(kind.form, parallel)
    assert told(reading, pieces) == told(reading, list(text)) == held
    assert len(calls_of(held)) == (len(calls) if parallel else 1)


@pytest.mark.parametrize("name", list(KINDS))
def test_pieces_come_while_the_call_is_written(name: str) -> None:
    """Letter by letter; the call that is held back comes as one."""
    kind = KINDS[name]
    text = kind.answer(MANY, SUM)
    first = len(kind.opening + kind.call(*MANY))
    parser = AnswerParser(certain(kind.form))
    came: list[tuple[int, Part]] = []
    for at, letter in enumerate(text):
        came += [(at, part) for part in parser.feed(letter)]
        assert parser.called == any(isinstance(part, Call) for _, part in came)
    calls = [at for at, part in came if isinstance(part, Call)]
    pieces = [at for at, part in came if isinstance(part, Arguments) and part.index == 0]
    assert len(calls) == 2
    assert calls[0] <= pieces[0] < first - 1 and len(pieces) > 2
    held = AnswerParser(reading_of(kind.form))
    in_one = [part for letter in text for part in held.feed(letter)] + held.end()
    assert [type(part) for part in in_one] == [Call, Arguments] * 2


@pytest.mark.parametrize("name", AS_JSON)
def test_json_is_told_at_once(name: str) -> None:
    kind = KINDS[name]
    text = kind.answer(MANY)
    begin = text.index(MANY[1])
    parser = AnswerParser(certain(kind.form))
    (call, piece) = parser.feed(text[: begin + 1])
    assert (call, piece) == (Call(0, getattr(call, "id", ""), "types"), Arguments(0, "{"))
    # A backslash waits for what it escapes.
    waits = ""
    for letter in MANY[1][1:]:
        waits += letter
        told_now = [part.text for part in parser.feed(letter) if isinstance(part, Arguments)]
        assert told_now in ([waits], []) and (told_now or letter == "\\"), waits
        waits = "" if told_now else waits
    assert not waits


@pytest.mark.parametrize("form", AS_TEXT)
def test_parameters_are_told_one_by_one(form: str) -> None:
    (kind,) = [kind for kind in KINDS.values() if kind.form == form]
    parts = parts_of(certain(form), [kind.answer(SUM, ("get.time-now", "{}"))])
    texts = [(part.index, part.text) for part in parts if isinstance(part, Arguments)]
    assert texts == [(0, '{"a": 7'), (0, ', "b": 5'), (0, "}"), (1, "{}")]


@pytest.mark.parametrize("name", list(KINDS))
def test_an_answer_that_is_cut(name: str) -> None:
    """A call is told as far as it came; before its name is known, it is content.

    The end of the text ends a call of harmony that has no arguments yet, and one of glm45 behind
    any parameter, as where they are held back: it may be the call's own end.
    """
    kind = KINDS[name]
    written = [MANY, SUM]
    text = kind.answer(*written)
    reading = certain(kind.form)
    incomplete = 0
    for at in range(len(text)):
        parts = told(reading, [text[:at]])
        assert told(reading, list(text[:at])) == parts
        calls = calls_of(parts)
        answer = reading.read(text[:at])
        assert [(call.name, arguments) for call, arguments in answer.calls] == calls
        for (function, arguments), (whole_function, whole) in zip(calls, written, strict=False):
            end = "}" if kind.form in ("glm45", "harmony") else ""
            assert function == whole_function
            assert arguments == whole or whole.startswith(arguments.removesuffix(end))
        assert calls[:-1] == written[: len(calls)][:-1]
        if calls and calls[-1] != written[len(calls) - 1]:
            incomplete += 1
            assert not any(isinstance(part, Content) for part in parts)
            parser = AnswerParser(reading)
            parser.feed(text[:at])
            parser.end()
            assert parser.called
    assert incomplete > 10


@pytest.mark.parametrize("name", list(KINDS))
def test_later_calls_are_dropped_with_all_pieces(name: str) -> None:
    kind = KINDS[name]
    text = kind.answer(SUM, MANY)
    assert calls_of(told(certain(kind.form, parallel=False), list(text))) == [SUM]


def test_a_call_that_is_dropped_behind_one_that_was_held_back() -> None:
    first = '<tool_call>{"arguments": {}, "name": "add"}</tool_call>'
    parts = told(certain("hermes", parallel=False), list(first + KINDS["hermes"].answer(MANY)))
    assert calls_of(parts) == [("add", "{}")]


def test_what_looks_like_another_call_than_the_one_is_text() -> None:
    """Behind one call the grammar allows any text."""
    call = KINDS["hermes"].answer(SUM)
    rest = '\n<tool_call>\n{"name": "add", "arguments": {"a": oops'
    parts = told(certain("hermes", parallel=False), [f"I add.\n{call}{rest}"])
    assert [type(part) for part in parts] == [Content, Call, Arguments, Content]
    assert parts[-1] == Content(rest)


HEADS = [
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'),
    ("hermes", '<tool_call>{"id": 1, "name": "add", "arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\u0061dd", "arguments": {"a": 1}}</tool_call>'),
    ("llama", '{"type": "function", "name": "add", "parameters": {"a": 1}}'),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "add"}]'),
]


@pytest.mark.parametrize(("form", "call"), HEADS)
def test_another_head_is_held_back(form: str, call: str) -> None:
    parser = AnswerParser(certain(form))
    assert all(not parser.feed(letter) for letter in call[:-1])
    parts = parser.feed(call[-1]) + parser.end()
    assert calls_of(parts) == [("add", '{"a": 1}')]
    wrong = call.replace('"name"', '"nobody"')
    assert told(certain(form), list(wrong)) == [Content(wrong)]


def test_another_head_among_calls() -> None:
    other = '{"arguments": {"a": 1}, "name": "add"}'
    good = '{"name": "add", "arguments": {"a": 7, "b": 5}}'
    for calls in ([good, other, good], [other, good, good]):
        for form, text in (
            ("mistral", f"[TOOL_CALLS] [{', '.join(calls)}]"),
            ("llama", "; ".join(calls)),
            ("hermes", "".join(f"<tool_call>{call}</tool_call>" for call in calls)),
        ):
            parts = told(certain(form), list(text))
            assert parts == told(reading_of(form), [text]), form
            assert len(calls_of(parts)) == 3


@pytest.mark.parametrize("name", list(KINDS))
def test_text_beside_calls(name: str) -> None:
    kind = KINDS[name]
    call = kind.answer(SUM)
    before = "I add.\n"
    if kind.form == "harmony":
        before = "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
    if kind.form == "llama":
        call = f"<|python_tag|>{call}"
    parts = told(certain(kind.form), list(before + call))
    assert parts == told(reading_of(kind.form), [before + call])
    assert parts[0] == Content("I add.") and calls_of(parts) == [SUM]


def test_a_thought_is_none_of_the_calls() -> None:
    call = KINDS["hermes"].answer(SUM)
    reading = replace(certain("hermes"), thinks=True)
    parts = told(reading, list(f"<think>\n{call[:49]}\n</think>\n\n{call}"))
    assert parts[0] == Reasoning(call[:49]) and calls_of(parts[1:]) == [SUM]


@pytest.mark.parametrize("name", AS_JSON)
@pytest.mark.parametrize(
    "arguments",
    ['{"a": ' * (MAX_TEXT_DEPTH + 9) + "1" + "}" * (MAX_TEXT_DEPTH + 9), f'{{"a": {"1" * 1001}}}'],
    ids=["deep", "long"],
)
def test_arguments_beyond_bounds_are_told_as_they_are(name: str, arguments: str) -> None:
    kind = KINDS[name]
    text = kind.answer(("add", arguments))
    assert calls_of(told(certain(kind.form), list(text))) == [("add", arguments)]
    assert told(reading_of(kind.form), [text]) == [Content(text)]


@pytest.mark.parametrize("form", AS_TEXT)
@pytest.mark.parametrize(
    "value", ["[" * 30 + "]" * 30, "[" * 30, "1" * (MAX_DIGITS + 1)], ids=["deep", "open", "long"]
)
def test_values_beyond_bounds_become_strings(form: str, value: str) -> None:
    (kind,) = [kind for kind in KINDS.values() if kind.form == form]
    text = kind.answer(("add", '{"a": 7, "b": "VALUE"}')).replace("VALUE", value)
    ((_, arguments),) = calls_of(told(certain(form), list(text)))
    assert json.loads(arguments) == {"a": 7, "b": value}


@pytest.mark.parametrize("form", AS_TEXT)
def test_a_parameter_that_comes_twice_keeps_its_first_value(form: str) -> None:
    (kind,) = [kind for kind in KINDS.values() if kind.form == form]
    twice = kind.answer(("add", '{"a": 7, "a": 8, "b": 5}'))
    assert calls_of(told(certain(form), list(twice))) == [SUM]


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        pytest.param(inner, name, marks=[] if number % 4 == place else [pytest.mark.slow])
        for number, name in enumerate(KINDS)
        for place, inner in enumerate(("x", "\\\\", "[1], ", "\n"))
    ],
    ids=repr,
)
def test_time_of_pieces_is_linear(name: str, inner: str) -> None:
    """Reading or moving the arguments again with each piece would take minutes."""
    kind = KINDS[name]
    long = json.dumps(json.loads('"' + inner.replace("\n", "\\n") + '"') * (400_000 // len(inner)))
    text = kind.answer(("types", f'{{"str": {long}}}'))
    began = time.thread_time()
    pieces = [text[at : at + 400] for at in range(0, len(text), 400)]
    assert calls_of(told(certain(kind.form), pieces)) == [("types", f'{{"str": {long}}}')]
    assert time.thread_time() - began < 60


def test_time_of_letters_is_linear() -> None:
    parser = AnswerParser(certain("hermes"))
    parts = parser.feed('<tool_call>{"name": "add", "arguments": {"a": "')
    began = time.thread_time()
    for _ in range(200_000):
        parts += parser.feed("x")
    assert sum(len(part.text) for part in parts if isinstance(part, Arguments)) == 200_007
    assert time.thread_time() - began < 60


def test_functions_are_those_of_the_other_tests() -> None:
    assert {name for name, _ in CALLS} < set(FUNCTIONS)
