"""Custom tools whose input follows a grammar, in every form of calls."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from jaxserve.chat import UnknownFields
from jaxserve.chat.answers import Reading
from jaxserve.chat.answers.call_grammar import CallContext, calls_alone
from jaxserve.chat.answers.formats import TOOL_FORMATS
from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Notes
from jaxserve.server.http.agents.responses.tools import choose, read_tools
from jaxserve.structure import Structure
from jaxserve.structure.grammars import Grammars
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.chat.answers.test_certain_calls import END, KINDS, tokens_of
from tests.jaxserve.chat.answers.test_parameter_grammars import CLOSING
from tests.jaxserve.structure.lark.test_expression import CASES, PATCH, QUERY

MARKS = ("</parameter>", "</arg_value>", "</function>\n</tool_call>", "<parameter=b>", "</invoke>")
UNKNOWN: UnknownFields = "ignore"


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with closing(Grammars(ByteTokenizer(), (END,), 258)) as compiler:
        yield compiler


def custom(syntax: str, definition: str | None, **fields: Any) -> dict[str, Any]:
    format = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "write", "format": format, **fields}


def parameters(tool: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the parameters of a tool that the model sees, and those that its calls follow."""
    found = choose(read_tools([tool], Limits(), Notes(UNKNOWN)), None, False, Notes(UNKNOWN))
    assert found is not None and found.strict == {"write"}
    (offered,) = found.offered
    return offered["function"]["parameters"], found.followed["write"]


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_the_input_follows_a_lark_grammar(
    name: str, grammar: str, good: tuple[str, ...], bad: tuple[str, ...], grammars: Grammars
) -> None:
    kind = KINDS[name]
    _, followed = parameters(custom("lark", grammar))
    special = dict.fromkeys(kind.marks, ByteTokenizer.bos_id)
    context = CallContext(["write"], False, special)
    lark = calls_alone(TOOL_FORMATS[kind.form].syntax, context, [followed])
    compiled = grammars.compile(Structure("lark", lark, "tools"))
    reading = Reading(TOOL_FORMATS[kind.form], {"write": followed})

    def fits(text: str) -> bool:
        tokens = tokens_of(kind, kind.answer(("write", written(text))))
        return compiled.matcher().fits(tokens) == len(tokens)

    for text in good:
        assert fits(text), text
        ((_, arguments),) = reading.read(kind.answer(("write", written(text)))).calls
        assert json.loads(arguments) == {"input": text}
    for text in bad:
        assert not fits(text), text


def written(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)


@pytest.mark.parametrize("name", list(KINDS))
def test_no_input_ends_before_the_call_does(name: str, grammars: Grammars) -> None:
    """The mark that ends a value in a form without JSON is the only one that no input has."""
    kind = KINDS[name]
    _, followed = parameters(custom("regex", "(?s:.*)!"))
    special = dict.fromkeys(kind.marks, ByteTokenizer.bos_id)
    context = CallContext(["write"], False, special)
    lark = calls_alone(TOOL_FORMATS[kind.form].syntax, context, [followed])
    compiled = grammars.compile(Structure("lark", lark, "tools"))
    reading = Reading(TOOL_FORMATS[kind.form], {"write": followed})
    for mark in MARKS:
        text = f"a{mark}\n<b!"
        answer = kind.answer(("write", written(text)))
        tokens = tokens_of(kind, answer)
        fits = compiled.matcher().fits(tokens) == len(tokens)
        assert fits == (mark != CLOSING.get(kind.form))
        if fits:
            ((_, arguments),) = reading.read(answer).calls
            assert json.loads(arguments) == {"input": text}


def test_what_the_model_sees_of_a_grammar() -> None:
    shown, followed = parameters(custom("lark", QUERY))
    assert shown["properties"]["input"] == {
        "type": "string",
        "description": f"Text that follows this Lark grammar:\n{QUERY}",
    }
    assert set(followed["properties"]["input"]) == {"type", "pattern"}
    shown, followed = parameters(custom("regex", "[a-z]+"))
    assert shown == followed and shown["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"


@pytest.mark.parametrize(
    ("syntax", "definition", "problem"),
    [
        ("lark", None, "is missing"),
        ("regex", None, "is missing"),
        ("lark", 'start: "(" start ")" |', "line 1: 'start' is used inside of itself"),
        ("lark", PATCH.replace("LF?", "NL?"), "line 4: 'NL' is not defined"),
        ("lark", f'start: "{"a" * 70_000}"', "65536 are left for the grammars"),
        ("lark", "start: a a\na: b b\nb: /" + "a" * 30_000 + "/", "--max-grammar-bytes bounds"),
        ("regex", "a" * 70_000, "has 70000 bytes; 65536 are left for the grammars of custom tools"),
        ("regex", r"[\x{110000}]", r"\x{110000} is no character"),
        ("regex", r"\x0b", "has the control character U+000B"),
        ("lark", r'start: "\u0001"', "has the control character U+0001"),
        ("regex", "[a-z&&[^b]]", "'&&' in a class"),
    ],
)
def test_a_grammar_that_is_refused(syntax: str, definition: str | None, problem: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_tools([custom(syntax, definition)], Limits(), Notes(UNKNOWN))
    assert refused.value.field == "tools[0].format.definition"
    assert problem in str(refused.value)


def test_the_grammars_of_a_request_have_a_bound_together() -> None:
    grammar = "start: a a\na: b b\nb: /" + "a" * 5_000 + "/"
    tools = [custom("lark", grammar) | {"name": f"t{i}"} for i in range(4)]
    assert len(read_tools(tools[:3], Limits(), Notes(UNKNOWN)).followed) == 3
    with pytest.raises(RequestError, match="--max-grammar-bytes") as refused:
        read_tools(tools, Limits(), Notes(UNKNOWN))
    assert refused.value.field == "tools[3].format.definition"


@pytest.mark.parametrize("name", [["x"], {"a": 1}, 5])
def test_a_name_that_is_none(name: Any) -> None:
    """It is refused with the other fields of the tool."""
    found = read_tools([custom("lark", 'start: "a"') | {"name": name}], Limits(), Notes(UNKNOWN))
    with pytest.raises(RequestError, match=r"tools\[0\].name"):
        choose(found, None, False, Notes(UNKNOWN))
