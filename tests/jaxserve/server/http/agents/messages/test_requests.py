"""Requests to /v1/messages: what becomes of their fields, and which are refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Notes, parsed
from jaxserve.server.http.agents.messages.conversation import conversation_of
from jaxserve.server.http.agents.messages.settings import options_of, params_of
from jaxserve.server.http.agents.messages.tools import tools_in
from jaxserve.server.http.agents.messages.types import MessagesBody
from jaxserve.server.security.seals import Seals
from tests.jaxserve.server.http.agents.messages.asking import (
    ADD,
    ASKED,
    CALL,
    COUNT,
    HIDDEN,
    HINT,
    PATH,
    PICTURE,
    RESULT,
    SEARCH,
    THOUGHT,
    answer,
    ask,
    refused,
    text,
    user,
)
from tests.jaxserve.server.http.scripted_model import Says, speaking


def test_settings() -> None:
    notes = Notes("ignore")
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    body = parsed(
        MessagesBody,
        ask(
            thinking={"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
            output_config={"effort": "high", "format": {"type": "json_schema", "schema": {}}},
            context_management={"edits": edits},
            metadata={"user_id": "x"},
            temperature=0.5,
            top_k=-1,
            seed=7,
            stop_sequences=["x"],
        ),
        notes,
    )
    options = options_of(body, notes)
    assert (options.enable_thinking, options.thinking_budget) == (True, 1024)
    assert options.reasoning_effort == "high"
    params = params_of(body, {"temperature": 0.1, "top_p": 0.9}, notes)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 0, 7)
    assert (params.max_tokens, params.stop) == (200, ("x",))
    assert params.structure and params.structure.field == "output_config.format.schema"
    assert list(notes.fields) == ["metadata", "context_management.clear_thinking_20251015"]


@pytest.mark.parametrize(
    "given, thinks, ignored",
    [
        (None, None, []),
        ({"type": "adaptive"}, None, []),
        ({"type": "disabled"}, False, []),
        ({"type": "between_tools"}, None, ["thinking.type"]),
        ({"type": "adaptive", "display": "updates"}, None, ["thinking.display"]),
        ({"type": "adaptive", "block_binding": {}}, None, ["thinking.block_binding"]),
    ],
)
def test_thinking(given: Any, thinks: bool | None, ignored: list[str]) -> None:
    notes = Notes("ignore")
    body = parsed(MessagesBody, ask(thinking=given), notes)
    assert options_of(body, notes).enable_thinking is thinks
    assert list(notes.fields) == ignored


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be between 1 and"),
        ({"temperature": 3}, "temperature is 3"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences has 17 strings"),
        ({"stop_sequences": ["a"], "stop": "b"}, "stop is given beside stop_sequences"),
        ({"n": 2}, "n is not a field of this request; leave it out"),
        ({"max_output_tokens": 2}, "max_output_tokens is not a field of this request; use max_t"),
        ({"reasoning_effort": "low"}, "reasoning_effort is not supported: use output_config.eff"),
        ({"container": "x"}, "container is not supported: no code is executed here"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported: the server calls no other servers"),
        ({"thread": {"type": "create"}}, "thread is not supported: no conversation is kept here"),
        ({"thinking": {"type": "on"}}, "thinking.type must be 'enabled', 'disabled', 'adaptive'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens is 0"),
        (
            {"thinking": {"type": "adaptive", "budget_tokens": 9}},
            'thinking.budget_tokens is given, but the type is "adaptive"; leave it out',
        ),
        ({"output_config": {"effort": "x"}}, "output_config.effort is 'x'; it must be one of"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type is 'x'; only"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema is missing",
        ),
        ({"output_format": {"type": "json_schema", "schema": 5}}, "output_format.schema is 5"),
        ({"system": [PICTURE]}, 'system[0].type is "image", which is not supported'),
        ({"context_management": {"edits": [{}]}}, "context_management.edits[0].type is None"),
    ],
)
def test_wrong_settings(fields: dict[str, Any], problem: str) -> None:
    notes = Notes("ignore")
    with pytest.raises(RequestError) as error:
        body = parsed(MessagesBody, ask(**fields), notes)
        conversation_of(body, Seals(), notes, answered=True)
        options_of(body, notes)
        params_of(body, {}, notes)
    assert str(error.value).startswith(problem)


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"colour": "red"}, "colour is not a field of this request; leave it out"),
        ({"thinking": {"type": "adaptive", "x": 1}}, "thinking.x is not a field of thinking"),
        ({"tools": [{"type": "x_1", "name": "x"}]}, "tools[0].type is 'x_1', which is not known"),
        (
            {"context_management": {"edits": [{"type": "x"}]}},
            "context_management.edits[0].type is 'x', which is not known here; leave it out",
        ),
    ],
)
def test_unknown_fields(fields: dict[str, Any], problem: str) -> None:
    for rule in ("ignore", "error"):
        notes = Notes(rule)  # type: ignore[arg-type]
        try:
            body = parsed(MessagesBody, ask(**fields), notes)
            options_of(body, notes)
            tools_in(body, Limits(), notes)
            assert rule == "ignore"
            assert [each.listed for each in notes.fields.values()] == [False]
        except RequestError as error:
            assert rule == "error" and str(error).startswith(problem)


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0.5, 1e999, 10**400, "", "x", "\ud83d", [], [None], [[]], ["x"], [{}], {}),
    *({"type": None}, {"type": []}, {"type": "x"}, [{"type": "text"}], [{"type": 5}], {"x": {}}),
)


@pytest.mark.parametrize("name", list(MessagesBody.model_fields))
def test_fields_with_odd_values(name: str) -> None:
    for value in ODD:
        _translate(ask(**{name: value}))


@pytest.mark.parametrize("block", [text("x"), CALL, RESULT, HIDDEN, THOUGHT, ADD])
def test_objects_with_odd_values(block: dict[str, Any]) -> None:
    for name in (*block, "x", "cache_control"):
        for value in ODD:
            odd = block | {name: value}
            _translate(ask(tools=[odd]))
            _translate(ask(system=[odd]))
            for messages in ([user(odd)], [*ASKED, answer(odd), user(RESULT)], [odd]):
                _translate(ask(messages=messages))


def _translate(given: dict[str, Any]) -> None:
    """Read a body, which may be refused and nothing else."""
    notes = Notes("ignore")
    try:
        body = parsed(MessagesBody, given, notes)
        conversation_of(body, Seals(), notes, answered=True)
        tools_in(body, Limits(), notes)
        options_of(body, notes)
        params_of(body, {}, notes)
    except RequestError as error:
        assert error.field


@pytest.mark.system
def test_what_is_counted_is_billed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    thinks = "{{ '' if true else '<think></think>' }}{{ thinking_budget }}{{ enable_thinking }}"

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "<tool_call>", end=thinks) as http:
            says("12")
            made = [*ASKED, answer(CALL), user(RESULT, text("And?"))]
            for fields in (
                {},
                {"system": "Be short."},
                {"system": [text("Be"), text("short.")], "tools": [ADD, SEARCH]},
                {"messages": made, "tools": [ADD], "tool_choice": {"type": "none"}},
                {"messages": made, "tools": [ADD], "thinking": {"type": "disabled"}},
                {"thinking": {"type": "enabled", "budget_tokens": 1234}},
            ):
                # Fields of the answer count nothing.
                counted = await http.post(COUNT, ask(**fields))
                assert counted.status_code == 200, counted.text
                without = {k: v for k, v in ask(**fields).items() if k != "max_tokens"}
                assert (await http.post(COUNT, without)).json() == counted.json()
                usage = (await http.post(PATH, ask(**fields))).json()["usage"]
                billed = usage["input_tokens"] + usage["cache_read_input_tokens"]
                assert counted.json() == {"input_tokens": billed}
            # A conversation that ends with an answer can be counted as well.
            ended = {"messages": [*ASKED, answer(text("12"))]}
            assert (await http.post(COUNT, ended)).json()["input_tokens"] > 16

    asyncio.run(main())


@pytest.mark.system
def test_names_of_what_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "<tool_call>") as http:
            says("12")
            body = ask(
                tools=[ADD, SEARCH],
                system=[text("x", **HINT)],
                metadata={"user_id": "x"},
                thinking={"type": "adaptive"},
                output_config={"effort": "high"},
                colour="red",
            )
            names = [
                *("metadata", "colour", "cache_control", "tools.web_search_20250305"),
                "output_config.effort",
            ]
            for path in (PATH, COUNT):
                response = await http.post(path, body)
                assert response.status_code == 200, response.text
                found = response.headers["jaxserve-ignored"].split(", ")
                left = {"max_tokens"} if path == COUNT else set()
                assert set(found) - left == set(names)
            error = await refused(http, ask(tools=[SEARCH], tool_choice={"type": "any"}))
            assert error.startswith("tool_choice.type")
            schema = {"type": "json_schema", "schema": {"type": "object"}}
            forced = ask(tools=[ADD], tool_choice={"type": "any"})
            error = await refused(http, forced | {"output_config": {"format": schema}})
            assert error.startswith("output_config.format.schema is given together with calls")
            long = [*ASKED, user(text("\ud83d"))]
            response = await http.raw.post(
                PATH,
                content=json.dumps(ask(messages=long)),
                headers={"content-type": "application/json"},
            )
            assert response.json()["error"]["message"].startswith("messages[1].content[0].text has")

    asyncio.run(main())
