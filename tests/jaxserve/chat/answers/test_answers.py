"""Answers of every form: what is a call, what is not, and that no cut of the text changes
anything."""

import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.chat.answers import AnswerParser, Arguments, Call, Content, Part, Reading, Reasoning
from jaxserve.chat.answers.formats import (
    TOOL_FORMATS,
    TOOL_PARSERS,
    AnswerFormats,
    choose_formats,
)

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "golden" / "tool_answers.json").read_text(encoding="utf-8")
)
TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
NULL = {"type": "null"}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}},
    "get_weather": {
        "type": "object",
        "properties": {"city": TEXT, "state": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}},
    },
    "get.time-now": {},
    "types": {
        "type": "object",
        "properties": {
            "int": NUMBER,
            "float": {"type": "float"},
            "bool": {"type": "boolean"},
            "str": TEXT,
            "obj": {"type": "object"},
            "list": {"items": {}},
            "maybe_int": {"type": ["integer", "null"]},
            "maybe_str": {"anyOf": [TEXT, NULL]},
            "maybe_obj": {"oneOf": [{"type": "object"}, NULL]},
            "text_or_int": {"anyOf": [TEXT, NUMBER, NULL]},
            "level": {"$ref": "#/$defs/Level"},
            "point": {"allOf": [{"$ref": "#/$defs/Point"}], "description": "x and y"},
            "mode": {"anyOf": [{"const": "auto"}, NUMBER]},
            "any": {},
        },
        "$defs": {
            "Level": {"enum": ["5", "10"]},
            "Point": {"type": "object", "properties": {"x": NUMBER, "next": {"$ref": "#"}}},
        },
    },
}
AS_TEXT = ("qwen3_coder", "glm45", "minimax_m2")  # arguments are written anew


def reading_of(
    form: str, thinks: bool = False, opened: bool = False, parallel: bool = True
) -> Reading:
    channels = form == "harmony"
    return Reading(TOOL_FORMATS.get(form), FUNCTIONS, parallel, thinks, opened, channels)


def parts_of(reading: Reading, pieces: Sequence[str]) -> list[Part]:
    """Return the parts of an answer that comes in pieces, with neighbours of a kind joined."""
    ids = itertools.count()
    parser = AnswerParser(reading, lambda: f"id{next(ids)}")
    found = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    joined: list[Part] = []
    for part in found:
        last = joined[-1] if joined else None
        match last, part:
            case (Content(), Content()) | (Reasoning(), Reasoning()):
                joined[-1] = type(part)(last.text + part.text)
            case _:
                joined.append(part)
    return joined


def expected(case: dict[str, Any]) -> list[Part]:
    found: list[Part] = []
    calls = itertools.count()
    ids = itertools.count()
    for kind, *values in case["parts"]:
        if kind == "call":
            index = next(calls)
            name, arguments, *written = values
            id = written[0] if written else f"id{next(ids)}"
            found += [Call(index, id, name), Arguments(index, arguments)]
        else:
            found.append({"content": Content, "reasoning": Reasoning}[kind](values[0]))
    return found


def case_reading(case: dict[str, Any]) -> Reading:
    return reading_of(
        case["form"],
        case.get("thinks", False),
        case.get("opened", False),
        case.get("parallel", True),
    )


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['form']}: {case['name']}")
def test_golden_answers_however_they_are_cut(case: dict[str, Any]) -> None:
    text = case["text"]
    reading = case_reading(case)
    parts = expected(case)
    assert parts_of(reading, [text]) == parts
    assert parts_of(reading, list(text)) == parts
    for at in range(len(text) + 1):
        assert parts_of(reading, [text[:at], text[at:]]) == parts, at
    chance = random.Random(0)
    for _ in range(20):
        a, b = sorted(chance.choices(range(len(text) + 1), k=2))
        assert parts_of(reading, [text[:a], text[a:b], "", text[b:]]) == parts, (a, b)


def test_the_golden_answers_are_not_all_alike() -> None:
    for form in TOOL_FORMATS:
        own = [case for case in GOLDEN if case["form"] == form]
        calls = [sum(part[0] == "call" for part in case["parts"]) for case in own]
        assert 0 in calls and 1 in calls and 2 in calls, form


@pytest.mark.parametrize("form", ["none", *TOOL_FORMATS])
@pytest.mark.parametrize("thinks", [False, True])
@given(pieces=st.lists(st.text('ab{}[]"\\:, \n<>|/_｜▁thinkcol;.', max_size=12), max_size=8))
@settings(max_examples=60)
def test_text_without_marks_passes_unchanged(form: str, thinks: bool, pieces: list[str]) -> None:
    text = "".join(pieces)
    if any(
        mark in text
        for mark in (
            *("<think>", "</think>", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"),
            *("<minimax:tool_call>", "<|tool_calls_section_begin|>"),
        )
    ):
        return
    assert parts_of(reading_of(form, thinks), pieces) == ([Content(text)] if text else [])


FRAGMENTS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<think>",
        "</think>",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|start|>assistant", "<|channel|>", "<|constrain|>json", "<|message|>", "<|end|>"),
    *("analysis", "final", "commentary", " to=functions.add"),
    *("<function=add>", "</function>", "<parameter=a>", "</parameter>", "<parameter=", ">"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "a", "7"),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="add">', "</invoke>"),
    *('<parameter name="b">', "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "functions.add:0", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "True", "'", "\\'"),
    *(
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "add", "parameters": {}}',
        '{"a": "</tool_call>"}',
    ),
    *(
        "add",
        "function",
        "\n```json\n",
        "\n```",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        ";",
        ",",
        " ",
        "\n",
        "x",
        "<",
        "<tool",
    ),
)


@pytest.mark.parametrize("form", list(TOOL_FORMATS))
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14), data=st.data())
@settings(max_examples=75)
def test_cuts_change_nothing_of_anything(
    form: str, fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    reading = reading_of(form, thinks=data.draw(st.booleans()))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    parts = parts_of(reading, [text])
    assert parts_of(reading, pieces) == parts_of(reading, list(text)) == parts
    kept = "".join(part.text for part in parts if isinstance(part, Content | Reasoning))
    is_said = not (reading.thinks or reading.channels)
    if is_said and not any(isinstance(part, Call) for part in parts):
        assert kept == text, "nothing is lost where nothing is called"
    for part in parts:
        if isinstance(part, Arguments):
            assert isinstance(json.loads(part.text), dict)
            is_written = form in AS_TEXT or (reading.channels and part.text == "{}")
            assert part.text in text or is_written


DEEP = {
    "hermes": '<tool_call>{"name": "add", "arguments": %s}</tool_call>',
    "llama": '{"name": "add", "parameters": %s}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"x": %s}',
    "harmony": "<|channel|>commentary to=functions.add<|message|>%s",
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add"
        "<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "qwen3_coder": ("<tool_call><function=add><parameter=a>%s</parameter></function></tool_call>"),
    "glm45": "<tool_call>add<arg_key>a</arg_key><arg_value>%s</arg_value></tool_call>",
    "minimax_m2": (
        '<minimax:tool_call><invoke name="add"><parameter name="a">%s</parameter></invoke>'
        "</minimax:tool_call>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        "<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_calls_section_end|>"
    ),
}


@pytest.mark.parametrize("form", list(TOOL_FORMATS))
def test_depth_is_bounded(form: str) -> None:
    fine = DEEP[form] % ('{"a": ' * 20 + "1" + "}" * 20)
    assert any(isinstance(part, Call) for part in parts_of(reading_of(form), [fine]))
    deep = DEEP[form] % ('{"a": ' * 100_000 + "1" + "}" * 100_000)
    assert parts_of(reading_of(form), [deep]) == [Content(deep)]


# Texts that look like calls of a form.
ALIKE = {
    '<tool_call>{"': "hermes",
    "[TOOL_CALLS] [": "mistral",
    '<|python_tag|>{"\\"': "llama",
    "<｜tool▁calls▁begin｜>{": "deepseek",
    "<|channel|>commentary to=functions.add<|message|>{": "harmony",
    "<|start|>assistant ": "harmony",
    "<tool_call>\n<function=add>\n<parameter=a>\n": "qwen3_coder",
    "<tool_call>add<arg_key>": "glm45",
    "<tool_call>add<arg_key>a</arg_key><arg_value>": "glm45",
    '<minimax:tool_call><invoke name="add"><parameter name="a">': "minimax_m2",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0": "kimi_k2",
    "\n": "hermes",
    '{"a": "': "llama",
}
BEGUN_ALIKE = ("hermes", "<tool_call>add<arg_key>")  # another form, whose calls begin so too


@pytest.mark.parametrize(
    ("form", "text"),
    [
        pytest.param(
            form,
            text,
            marks=[] if form == own or (form, text) == BEGUN_ALIKE else [pytest.mark.slow],
        )
        for text, own in ALIKE.items()
        for form in TOOL_FORMATS
    ],
    ids=repr,
)
def test_time_is_linear(form: str, text: str) -> None:
    """A text that looks like calls all over; reading or moving any of it again and again would take
    minutes.
    """
    long = text * (400_000 // len(text))
    began = time.thread_time()
    pieces = [long[at : at + 4000] for at in range(0, len(long), 4000)]
    assert parts_of(reading_of(form), pieces) == [Content(long)]
    assert reading_of(form).read(long).content == long
    assert time.thread_time() - began < 60


@pytest.mark.parametrize("form", ["think", "harmony"])
def test_time_is_linear_in_white_space(form: str) -> None:
    """A model that writes lines without end, letter by letter."""
    head = {"think": "<think>a", "harmony": "<|channel|>final<|message|>a"}[form]
    reading = reading_of(form, thinks=True)
    began = time.thread_time()
    parser = AnswerParser(reading)
    parts = parser.feed(head)
    for _ in range(200_000):
        parts += parser.feed("\n")
    parts += parser.end()
    assert sum(len(part.text) for part in parts if not isinstance(part, Call)) == 200_001
    assert time.thread_time() - began < 60


def test_the_first_call_only() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    found = parts_of(reading_of("hermes", parallel=False), [f"a {call} b {call}"])
    assert found == [Content("a"), Call(0, "id0", "add"), Arguments(0, "{}"), Content(" b")]


@pytest.mark.parametrize(
    "value",
    [r"'\'", "'", '"', "{'a': ", "True ", '"\\', "[", "<parameter=a>"],
    ids=repr,
)
def test_time_of_values_is_linear(value: str) -> None:
    call = DEEP["qwen3_coder"] % (value * (400_000 // len(value)))
    began = time.thread_time()
    parts_of(reading_of("qwen3_coder"), [call])
    assert time.thread_time() - began < 60


@pytest.mark.parametrize("form", AS_TEXT)
def test_time_is_linear_in_the_calls(form: str) -> None:
    call = DEEP[form].replace("add", "types") % "7"
    began = time.thread_time()
    answer = reading_of(form).read(call * 3000)
    assert len(answer.calls) == 3000 and time.thread_time() - began < 60


def test_schemas_that_refer_to_each_other() -> None:
    """Definitions that refer to others twice each, in a chain and in a circle, are read once."""
    chain: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(2000)
    }
    circle = {"anyOf": [{"$ref": "#/$defs/circle"}, NUMBER]}
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/d0"}, "b": {"$ref": "#/$defs/circle"}},
        "allOf": [{"$ref": "#"}] * 3,
        "$defs": {**chain, "circle": circle},
    }
    reading = Reading(TOOL_FORMATS["qwen3_coder"], {"add": parameters})
    ((_, arguments),) = reading.read(DEEP["qwen3_coder"] % "7").calls
    assert arguments == '{"a": "7"}'


def test_ids_are_what_templates_of_mistral_accept() -> None:
    (call, _), (other, _) = reading_of("mistral").read("[TOOL_CALLS]add[ARGS]{}" * 2).calls
    assert call.id != other.id and all(len(c.id) == 9 and c.id.isalnum() for c in (call, other))


@pytest.mark.parametrize(
    ("template", "form", "thinks"),
    [
        ("{{ '[TOOL_CALLS] [' }}", "mistral", False),
        ("{{ '<｜tool▁calls▁begin｜>' }} content.split('</think>')", "deepseek", True),
        ("{{ '<tool_call>\n' }}", "hermes", False),
        ("{{ '<tool_call>\n<function=' }}", "qwen3_coder", False),
        ("<function={{ name }}>", "none", False),
        ("{{ ns + '<tool_call>' }}<invoke name=\"", "none", False),
        ("{{ '<tool_call>' + name }}<arg_key> </think>", "glm45", True),
        ("{{ '<minimax:tool_call>' }}<invoke name= </think>", "minimax_m2", True),
        ("<|tool_calls_section_begin|>{{ id }}", "kimi_k2", False),
        ("{{ '<|start_header_id|>' }} message.tool_calls", "llama", False),
        ("{{ '<|start_header_id|>' + role }}", "none", False),
        ("{{ m.content }}", "none", False),
        ("<|start|>system<|message|> {{ '<|channel|>final' }}", "harmony", True),
    ],
)
def test_forms_are_recognised_by_the_template(template: str, form: str, thinks: bool) -> None:
    found = choose_formats(template, "auto", "auto")
    assert (found.tools, found.thinks) == (TOOL_FORMATS.get(form), thinks)
    for name in TOOL_PARSERS[1:]:
        channels = name == "harmony" or (name == "none" and form == "harmony")
        expected = AnswerFormats(TOOL_FORMATS.get(name), False, channels)
        assert choose_formats(template, name, "none") == expected
    assert choose_formats(template, "auto", "think").thinks
