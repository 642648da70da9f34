"""Grammars of calls whose arguments are text: what fits them, and which schemas have none."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from jaxserve.chat.answers.call_grammar import (
    CallContext,
    ParametersError,
    calls_alone,
    text_and_calls,
)
from jaxserve.chat.answers.formats import TOOL_FORMATS
from jaxserve.chat.answers.parser import Reading
from jaxserve.structure import Structure
from jaxserve.structure.grammars import Grammars
from tests.byte_tokenizer import ByteTokenizer

DATA = os.environ.get("JAXSERVE_TEST_DATA")
CALLS = {  # one call of f, and one of its parameters
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n%s</function>\n</tool_call>",
        "<parameter=%s>\n%s\n</parameter>\n",
    ),
    "glm45": ("<tool_call>f%s</tool_call>", "<arg_key>%s</arg_key><arg_value>%s</arg_value>"),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n%s</invoke>\n</minimax:tool_call>',
        '<parameter name="%s">%s</parameter>\n',
    ),
}
CLOSING = {"qwen3_coder": "</parameter>", "glm45": "</arg_value>", "minimax_m2": "</parameter>"}
END = 257  # token


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with closing(Grammars(ByteTokenizer(), (END,), 258)) as compiler:
        yield compiler


def written(form: str, **arguments: str) -> str:
    call, parameter = CALLS[form]
    return call % "".join(parameter % each for each in arguments.items())


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)[:1]}


def grammar_of(form: str, *schemas: dict[str, Any], marks: dict[str, int] | None = None) -> str:
    context = CallContext(["f", "g"][: len(schemas)], False, marks or {})
    return calls_alone(TOOL_FORMATS[form].syntax, context, schemas)


def fits(grammars: Grammars, grammar: str, text: str) -> bool:
    tokens = [*text.encode(), END]
    return grammars.compile(Structure("lark", grammar, "tools")).matcher().fits(tokens) == len(
        tokens
    )


DEFINITIONS = {
    "Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "Level": {"enum": ["low", "high"]},
}
VALUES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string"}, ["x", "", "5", "a\n\n <b> \\ \"c' ", "null", "</other>"], []),
    ({"type": "string", "default": "x", "description": "y"}, ["x"], []),
    ({}, ["5", "x"], []),
    (True, ["5", "x"], []),
    ({"type": ["string", "null"]}, ["null", "x"], []),
    ({"type": "integer", "minimum": 3}, ["3", "40"], ["2", "x", "3.5", ""]),
    ({"type": "number"}, ["3.5", "-1e2"], ["x"]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    ({"type": "null"}, ["null"], ["None"]),
    ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]", "[]"], ['["a"]', "x"]),
    ({"items": {"type": "integer"}}, ["[1]"], ["x"]),
    ({"type": "object", "properties": {"x": {"type": "integer"}}}, ['{"x": 1}'], ['{"x": "1"}']),
    ({"type": ["integer", "null"]}, ["5", "null"], ["x"]),
    ({"enum": ["a", "b\nc", None, 5]}, ["a", "b\nc", "null", "5"], ["b", "6", '"a"']),
    ({"type": "string", "enum": ["a", 5, ""]}, ["a", ""], ["5"]),
    ({"const": "a"}, ["a"], ["b"]),
    ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, ["auto", "7"], ["x"]),
    ({"oneOf": [{"enum": ["a"]}, {"type": "string", "const": "b"}]}, ["a", "b"], ["c"]),
    ({"anyOf": [{"type": "string", "minLength": 5}, {"const": "x"}]}, ["hello", "x"], ["hell"]),
    ({"$ref": "#/$defs/Level"}, ["low"], ["x"]),
    ({"$ref": "#/$defs/Point", "description": "d"}, ['{"x": 1}'], ["{}"]),
    ({"allOf": [{"$ref": "#/$defs/Point"}]}, ['{"x": 1}'], ["{}"]),
    ({"type": "array", "items": {"$ref": "#/$defs/Point"}}, ['[{"x": 1}]'], ["[{}]"]),
    ({"type": "string", "minLength": 2}, ["ab", "<ab", "a\u00e9", "abc\n"], ["", "a"]),
    ({"type": "string", "maxLength": 2}, ["", "ab", "\u6771\u4eac"], ["abc"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    ({"type": "string", "minLength": 1, "maxLength": 200}, ["a", "<p>"], ["", "a" * 201]),
    ({"type": "string", "maxLength": 524288}, ["a" * 5000], []),
    ({"type": "string", "pattern": "^wf_[a-z0-9-]{6,}$"}, ["wf_abc-12"], ["wf_a", "xwf_abcdef"]),
    ({"type": "string", "pattern": r"^(?:a|b\.c)+$"}, ["ab.ca"], ["b,c", ""]),
    (
        {"type": "string", "pattern": r"^\d[\w/]+\s$"},
        ["5a_ ", "5/\u00a0"],
        ["\u0665a ", "5\u00e9 ", "5a\u0085"],
    ),
    ({"type": "string", "pattern": "^(?:.|[^a])$"}, ["x", "\u00e9", "a", "<", "\n"], ["", "xx"]),
    (
        {"type": "string", "pattern": r"^(?:[+/<-][^\n]*\n)+end\n?$"},
        ["/x\nend", '+<b></b> </ "\\n\n+\nend\n'],
        ["+x\nend\n\n", "x\nend", "+</parameter>\n</arg_value>\nend"],
    ),
    ({"type": "string", "format": "uri"}, ["https://a.org:80/b?c=d#e"], ["a.org", "http:"]),
    ({"type": "string", "format": "uuid"}, ["0123abcd-0000-4000-8000-0123456789AB"], ["0123"]),
]


@pytest.mark.parametrize("form", list(CALLS))
@pytest.mark.parametrize(("schema", "right", "wrong"), VALUES, ids=str)
def test_values(
    grammars: Grammars, form: str, schema: Any, right: list[str], wrong: list[str]
) -> None:
    """What fits is read as a call of values that the schema allows."""
    parameters = {**object_of(a=schema), "$defs": DEFINITIONS}
    grammar = grammar_of(form, parameters)
    reading = Reading(TOOL_FORMATS[form], {"f": parameters})
    for text in right:
        call = written(form, a=text)
        assert fits(grammars, grammar, call), text
        ((_, arguments),) = reading.read(call).calls
        assert json.loads(arguments)["a"] in (text, _parsed(text))
    for text in wrong:
        assert not fits(grammars, grammar, written(form, a=text)), text


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize("form", list(CALLS))
def test_parameters(grammars: Grammars, form: str) -> None:
    text = {"type": "string"}
    grammar = grammar_of(form, {**object_of(a=text, b=text, c=text), "required": ["b"]}, {})

    def fit(**arguments: str) -> bool:
        return fits(grammars, grammar, written(form, **arguments))

    assert fit(b="1") and fit(a="1", b="2") and fit(b="1", c="2") and fit(a="1", b="2", c="3")
    assert not fit(a="1") and not fit() and not fit(b="1", a="2") and not fit(b="1", d="2")
    assert not fit(b="1", c="2", d="3") and not fit(b="1", b2="")
    call = written(form, d="7")
    of = {"glm45": ("l>f", "l>g"), "qwen3_coder": ("=f>", "=g>"), "minimax_m2": ('"f"', '"g"')}
    # A schema that says nothing allows anything.
    assert not fits(grammars, grammar, call) and fits(grammars, grammar, call.replace(*of[form]))
    assert fits(grammars, grammar, written(form).replace(*of[form]))
    assert not fits(grammars, grammar, call.replace(of[form][0], of[form][0].replace("f", "h")))
    nothing = grammar_of(form, {"type": "object", "properties": {}})
    assert fits(grammars, nothing, written(form))
    assert not fits(grammars, nothing, written(form, a="1"))


@pytest.mark.parametrize("form", list(CALLS))
@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {"type": "string", "maxLength": 9}, {"enum": ["abc"]}, {}]
)
def test_a_mark_that_is_a_token(form: str, schema: dict[str, Any], grammars: Grammars) -> None:
    marks = {CLOSING[form]: ByteTokenizer.bos_id}
    grammar = grammar_of(form, object_of(a=schema), marks=marks)
    before, _, after = written(form, a="abc").partition(CLOSING[form])
    matcher = grammars.compile(Structure("lark", grammar, "tools")).matcher()
    tokens = [*before.encode(), marks[CLOSING[form]], *after.encode(), END]
    assert matcher.fits(tokens) == len(tokens)


@pytest.mark.parametrize("form", list(CALLS))
def test_text_beside_strict_calls(form: str, grammars: Grammars) -> None:
    parameters = object_of(a={"type": "integer"})
    context = CallContext(["f"], True, {})
    grammar = text_and_calls(TOOL_FORMATS[form].syntax, context, [parameters], ())
    right = written(form, a="7")
    for text in ("", "I add.", right, f"I add.\n{right}", f"{right} Done.", f"{right}\n{right}"):
        assert fits(grammars, grammar, text), text
    for text in (written(form, a="x"), written(form), right.replace("f", "g", 1)):
        assert not fits(grammars, grammar, f"I add. {text}"), text


# Fifteen schemas, each twice the one behind it.
DOUBLED = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(14)}
DOUBLED["d14"] = {"type": "string"}
# A few schemas, each a hundred times the one behind it, and no value in the end.
EMPTY: dict[str, Any] = {
    f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 100} for i in range(8)
}
EMPTY["a8"] = {"anyOf": []}
TEXTS = {"text": {"type": "string", "pattern": "x" * 20_000}}
LARGE = {"type": "array", "items": {"$ref": "#/$defs/text"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (object_of(a={"type": "string", "format": "date"}), "parameters of 'f': 'a' has the format"),
    (object_of(a={"type": "string", "pattern": "a"}), "does not match whole strings"),
    (object_of(a={"type": "string", "pattern": "^a|b$"}), "ends belong to parts"),
    (object_of(a={"type": "string", "pattern": r"^a\$"}), "which ends with a backslash"),
    (object_of(a={"type": "string", "pattern": "^a)|(b$"}), "which has a ) without a ("),
    (object_of(a={"type": "string", "pattern": "^a$", "minLength": 1}), "at once"),
    (object_of(a={"type": "string", "minLength": 3, "maxLength": 2}), "below"),
    (object_of(a={"type": "string", "not": {"const": "a"}}), "'not'"),
    (object_of(a={"anyOf": [{"type": "string"}], "minLength": 3}), "'minLength'"),
    (object_of(a={"allOf": [{"type": "string"}, {"minLength": 3}]}), "allOf"),
    (object_of(a={"$ref": "#/$defs/nowhere"}), "none, or refers to itself"),
    (object_of(a={"$ref": "#/properties/a"}), "refers to itself"),
    (object_of(a={"$ref": "#/$defs/d0"}) | {"$defs": DOUBLED}, "more than 4096 alternatives"),
    (object_of(a={"$ref": "#/$defs/a0"}) | {"$defs": EMPTY}, "more than 4096 alternatives"),
    (object_of(**{f"p{i}": LARGE for i in range(20)}) | {"$defs": TEXTS}, "262144 characters"),
    ({"type": "string"}, "no object"),
    ({"type": 5}, "'type' of a wrong type"),
    ({"properties": [1]}, "'properties' of a wrong type"),
    ({"properties": {}, "required": 5}, "'required' of a wrong type"),
    ({"properties": {}, "required": [["x"]]}, "'required' of a wrong type"),
    *(
        (object_of(a={keyword: value}), f"{keyword!r} of a wrong type")
        for keyword in ("enum", "type", "$ref", "format", "anyOf", "pattern")
        for value in (5, None, {"a": 1}, [1] if keyword != "enum" and keyword != "anyOf" else 1)
    ),
    (object_of(a={"type": "string", "minLength": True}), "no count"),
    (object_of(a={"type": "string", "minLength": -5}), "no count"),
    (object_of(a={"type": "array", "items": {"$ref": "#/properties/b"}}, b={}), "no definition"),
    (object_of(a=False), "'a' has a schema that is none"),
    (object_of(a={"enum": []}), "allows no value"),
    ({"type": "object", "properties": {}, "required": ["a"]}, "'a' is required"),
    ({"type": "object", "patternProperties": {}}, "'patternProperties'"),
    ({"type": "object", "properties": {}, "minProperties": 1}, "'minProperties'"),
    ({"anyOf": [{}]}, "'anyOf'"),
    (object_of(**{"a\n": {}}), "no name that the format can hold"),
]


@pytest.mark.parametrize("form", list(CALLS))
@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=str)
def test_schemas_that_are_refused(form: str, schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ParametersError, match=re.escape(words)):
        grammar_of(form, schema)


def test_a_value_that_holds_the_mark() -> None:
    with pytest.raises(ParametersError, match="value with </arg_value>"):
        grammar_of("glm45", object_of(a={"const": "</arg_value>"}))


def functions_of_agents() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("claude_2.1.197_more_07", "codex_0.169.0_00"):
        file = Path(DATA or "", "agents", f"{name}.json")
        for tool in json.loads(file.read_text(encoding="utf-8"))["body"]["tools"]:
            for function in tool.get("tools") or [tool.get("function", tool)]:
                schema = function.get("input_schema") or function.get("parameters")
                if schema is not None:  # those of web_search belong to the server
                    yield function["name"], schema


@pytest.mark.skipif(not DATA, reason="needs JAXSERVE_TEST_DATA")
@pytest.mark.parametrize("form", ["hermes", "harmony", "kimi_k2", *CALLS])
def test_the_functions_of_agents_can_be_forced(form: str, grammars: Grammars) -> None:
    functions = list(functions_of_agents())
    assert len(functions) == 38
    for name, schema in functions:
        grammar = calls_alone(TOOL_FORMATS[form].syntax, CallContext([name], True, {}), [schema])
        grammars.compile(Structure("lark", grammar, "tools"))
