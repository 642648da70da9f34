"""Tools of Anthropic's API as functions."""

from typing import Any

import pytest

from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Notes, parsed
from jaxserve.server.http.agents.messages.tools import tools_in
from jaxserve.server.http.agents.messages.types import MessagesBody
from tests.jaxserve.server.http.agents.messages.asking import ADD, HINT, SEARCH, ask


def tools(*given: Any, **fields: Any) -> tuple[Any, list[str]]:
    notes = Notes("ignore")
    body = parsed(MessagesBody, ask(tools=list(given), **fields), notes)
    return tools_in(body, Limits(), notes), list(notes.fields)


def test_tools() -> None:
    found, ignored = tools(SEARCH, ADD | HINT | {"type": "custom", "strict": True})
    assert [each["function"] for each in found.offered] == [
        {"name": "add", "description": "a + b", "parameters": ADD["input_schema"]}
    ]
    assert (found.parallel, found.required, found.strict) == (True, frozenset(), {"add"})
    assert ignored == ["tools.web_search_20250305", "cache_control"]
    one = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    found, _ = tools(ADD, tool_choice=one)
    assert (found.parallel, found.required) == (False, {"add"})
    assert tools(ADD, tool_choice={"type": "any"})[0].required == {"add"}
    assert tools(ADD, tool_choice={"type": "none"})[0] is None
    assert tools(SEARCH, tool_choice={"type": "auto"})[0] is None
    found, ignored = tools(ADD | {"allowed_callers": ["code_execution_20260120"]})
    assert (found, ignored) == (None, ["tools.allowed_callers"])
    found, ignored = tools({"type": "teleport_20270101", "name": "x"})
    assert (found, ignored) == (None, ["tools.teleport_20270101"])
    found, _ = tools(ADD | {"input_examples": [{"a": 1}, {"a": 2}]})
    assert found.offered[0]["function"]["description"] == (
        'a + b\n\nExamples of its input, as JSON:\n{"a":1}\n{"a":2}'
    )


@pytest.mark.parametrize(
    "given, choice, problem",
    [
        ([5], None, "tools[0] must be"),
        ([SEARCH, ADD | {"name": "a b"}], None, "tools[1].name is 'a b'; give 1 to 128 letters"),
        ([SEARCH, ADD | {"input_schema": 5}], None, "tools[1].input_schema is 5; give a JSON"),
        ([{"name": "add"}], None, "tools[0].input_schema is missing; give a JSON schema"),
        ([ADD, ADD], None, "tools[1].name is 'add', the name of another function"),
        ([ADD] * 129, None, "tools has 129 entries; the limit is 128 (--max-tools)"),
        ([ADD], {"type": "function"}, "tool_choice.type must be 'auto', 'any', 'tool' or 'none'"),
        ([ADD], {"type": "tool"}, "tool_choice.name is missing"),
        ([ADD], {"type": "auto", "name": "add"}, "tool_choice.name is given, but the type is"),
        (
            [SEARCH, ADD],
            {"type": "tool", "name": "web_search"},
            "tool_choice.name is 'web_search', which is none of the tools that can be called here",
        ),
        ([SEARCH], {"type": "any"}, 'tool_choice.type is "any" without a tool'),
    ],
)
def test_wrong_tools(given: list[Any], choice: Any, problem: str) -> None:
    with pytest.raises(RequestError) as error:
        tools(*given, tool_choice=choice)
    assert str(error.value).startswith(problem)
