"""Requests to /v1/responses: what of them is honoured, without effect, or refused."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import openai.types.responses as api
import pytest
from openai.types import shared_params
from openai.types.responses import (
    custom_tool_param,
    function_tool_param,
    input_token_count_params,
    namespace_tool_param,
    response_create_params,
    response_custom_tool_call_param,
    response_function_tool_call_param,
    response_input_item_param,
    response_input_text_param,
    response_output_refusal_param,
    response_output_text_param,
    response_reasoning_item_param,
    response_text_config_param,
    tool_param,
)

from jaxserve.server.core.client_rules import ClientRules
from jaxserve.server.http.agents.listed import Listed
from jaxserve.server.http.agents.responses import item_types, tool_types, types
from jaxserve.server.observe.log import RequestLog
from jaxserve.server.observe.metrics import Metrics
from tests.jaxserve.server.http.agents.recorded import filled, recordings
from tests.jaxserve.server.http.harness import Http, serving
from tests.jaxserve.server.http.scripted_model import FORMS, Says, speaking

pytestmark = pytest.mark.system
PATH = "/v1/responses"
MARK = FORMS["hermes"][0]
F: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
IGNORED = "jaxserve-ignored"

# ---- lists of fields


def names(kind: Any) -> set[str]:
    """Return the fields of one of the client's types."""
    return {name.removesuffix("_") for name in get_type_hints(kind)}


def listed(kind: type[Listed]) -> set[str]:
    return {*kind.model_fields, *kind.ignored, *kind.refused}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (types.ResponsesBody, response_create_params.ResponseCreateParamsBase),
        (types.CountBody, input_token_count_params.InputTokenCountParams),
        (types.ReasoningOptions, shared_params.Reasoning),
        (types.TextOptions, response_text_config_param.ResponseTextConfigParam),
        (item_types.Message, response_input_item_param.Message),
        (item_types.Message, api.EasyInputMessageParam),
        (item_types.Message, api.ResponseOutputMessageParam),
        (item_types.ReasoningItem, response_reasoning_item_param.ResponseReasoningItemParam),
        (item_types.FunctionCall, response_function_tool_call_param.ResponseFunctionToolCallParam),
        (item_types.CustomCall, response_custom_tool_call_param.ResponseCustomToolCallParam),
        (item_types.CallOutput, response_input_item_param.FunctionCallOutput),
        (item_types.CallOutput, api.ResponseCustomToolCallOutputParam),
        (item_types.TextPart, response_input_text_param.ResponseInputTextParam),
        (item_types.TextPart, response_output_text_param.ResponseOutputTextParam),
        (item_types.Refusal, response_output_refusal_param.ResponseOutputRefusalParam),
        (tool_types.FunctionTool, function_tool_param.FunctionToolParam),
        (tool_types.FunctionTool, namespace_tool_param.ToolFunction),
        (tool_types.CustomTool, custom_tool_param.CustomToolParam),
        (tool_types.NamespaceTool, namespace_tool_param.NamespaceToolParam),
        (tool_types.CustomFormat, shared_params.custom_tool_input_format.Grammar),
    ],
)
def test_every_field_of_the_client_is_listed(ours: type[Listed], theirs: Any) -> None:
    assert names(theirs) <= listed(ours)


def test_every_type_of_the_client_is_listed() -> None:
    items = {
        kind
        for item in get_args(response_input_item_param.ResponseInputItemParam)
        for kind in _types(item)
    }
    read = {"message", "reasoning", "function_call", "function_call_output"}
    read |= {"custom_tool_call", "custom_tool_call_output"}
    assert items == item_types.OTHER_ITEMS | read
    tools = {kind for tool in get_args(tool_param.ToolParam) for kind in _types(tool)}
    assert tools <= tool_types.BUILT_IN | {"function", "custom", "namespace"}


def _types(kind: Any) -> set[str]:
    """Return the values of a type's field `type`."""
    hint = get_type_hints(kind)["type"]
    found = [each for arg in get_args(hint) for each in (get_args(arg) or (arg,))]
    return {each for each in found if isinstance(each, str)}


# ---- what is refused


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": 1}, "input", "must be a string or a list of items"),
    ({"input": []}, "input", "empty"),
    ({"input": [1]}, "input[0]", "must be an object"),
    ({"input": [{"role": "nobody", "content": ""}]}, "input[0].role", "must be"),
    ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
    ({"input": [{"role": "user", "content": 1}]}, "input[0].content", "list of parts"),
    (
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "x"},
                        {"type": "input_image", "image_url": "data:image/png;base64,AA"},
                    ],
                }
            ]
        },
        "input[0].content[1].type",
        "only text is supported",
    ),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "not supported"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "not supported"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c1", "output": "1"}]},
        "input[0].call_id",
        "is the id of no call",
    ),
    (
        {
            "input": [CALL, {"type": "function_call_output", "call_id": "c1", "output": [{}]}],
            "tools": [F],
        },
        "input[1].output[0].type",
        "must be a string",
    ),
    (
        {"input": [{"role": "user", "content": "x"}, {**CALL, "arguments": "{"}], "tools": [F]},
        "input[1].arguments",
        "is not the JSON text",
    ),
    (
        {"input": [{"type": "reasoning", "encrypted_content": "AAAA"}]},
        "input[0].encrypted_content",
        "nothing that a server of this kind makes",
    ),
    ({"input": "x", "background": True}, "background", "is not supported"),
    ({"input": "x", "conversation": "c"}, "conversation", "is not supported"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt", "is not supported"),
    ({"input": "x", "moderation": {}}, "moderation", "is not supported"),
    ({"input": "x", "top_logprobs": 2}, "top_logprobs", "/v1/chat/completions"),
    ({"input": "x", "include": ["message.output_text.logprobs"]}, "include[0]", "not supported"),
    ({"input": "x", "reasoning": {"effort": "much"}}, "reasoning.effort", "must be one of"),
    ({"input": "x", "reasoning": {"mode": "pro"}}, "reasoning.mode", "is not supported"),
    ({"input": "x", "text": {"verbosity": "much"}}, "text.verbosity", "must be one of"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "only text"),
    ({"input": "x", "temperature": 3}, "temperature", "must be between"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "must be"),
    ({"input": "x", "max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    ({"input": "x", "messages": []}, "messages", "is not a field"),
    ({"input": "x", "n": 2}, "n", "is not a field"),
    ({"input": "x", "system": "y"}, "system", "use instructions"),
    ({"input": "x", "output_config": {}}, "output_config", "is not a field"),
    ({"input": "x", "typical_p": 0.5}, "typical_p", "is not a field"),
    (
        {"input": "x", "reasoning": {"budget_tokens": 5}},
        "reasoning.budget_tokens",
        "is not a field",
    ),
    ({"input": [[]] * 2**16}, "input", "too many objects and values"),
    ({"input": "x", "response_format": {}}, "response_format", "is not a field"),
    ({"input": "x", "metadata": {"k" * 65: ""}}, "metadata", "the limits are"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "is None"),
    ({"input": "x", "tools": [F, F]}, "tools[1].name", "another function"),
    ({"input": "x", "tools": [F], "tool_choice": {"type": "web_search"}}, "tool_choice", "only"),
    (
        {"input": "x", "tools": [F], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice",
        "none of the tools",
    ),
    (
        {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"},
        "tool_choice",
        "",
    ),
    (
        {
            "input": "x",
            "tools": [
                {
                    "type": "custom",
                    "name": "c",
                    "format": {"type": "grammar", "syntax": "ebnf", "definition": "a = a;"},
                }
            ],
        },
        "tools[0].format.syntax",
        '"regex" and "lark"',
    ),
]


def test_what_is_refused_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, MARK) as http:
            for body, path, text in REFUSED:
                response = await http.post(PATH, body)
                assert response.status_code == 400, (body, response.text)
                error = response.json()["error"]
                assert error["param"] == path and text in error["message"], (body, error)
            for method, path in (
                ("GET", PATH),
                ("POST", f"{PATH}/resp_0/cancel"),
                ("POST", f"{PATH}/compact"),
            ):
                response = await http.raw.request(method, path)
                assert response.status_code == 404 and "no " not in response.json()["error"]["code"]
            await http.server.at_rest()

    asyncio.run(main())


# ---- what has no effect


WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"client_metadata": {"a": "b"}}, "client_metadata"),
    ({"user": "u", "safety_identifier": "s"}, "user, safety_identifier"),
    ({"prompt_cache_key": "k", "service_tier": "flex"}, "prompt_cache_key, service_tier"),
    ({"truncation": "auto"}, "truncation"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"include": ["web_search_call.results"]}, "include.web_search_call.results"),
    ({"tools": [F, {"type": "web_search"}]}, "tools.web_search"),
    ({"tools": [{"type": "something_new"}]}, "tools.something_new"),
    ({"something_new": 1}, "something_new"),
    ({"input": [{"role": "user", "content": "x", "passed": 1}]}, "input.passed"),
]


def test_what_has_no_effect_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, MARK) as http:
            says("12")
            for fields, expected in WITHOUT_EFFECT:
                response = await http.post(PATH, {"input": "x", **fields})
                assert response.status_code == 200, response.text
                assert response.headers[IGNORED] == expected
            chat = http.server.service.prompts.chat
            chat.unknown_fields = "error"
            for fields, _ in WITHOUT_EFFECT[-3:]:
                response = await http.post(PATH, {"input": "x", **fields})
                assert response.status_code == 400
                assert response.json()["error"]["code"].endswith("_parameter")

    asyncio.run(main())


def test_what_has_no_effect_is_logged_and_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: Says,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "jaxserve")

    async def main() -> None:
        metrics = Metrics(lambda: 0)
        watching: dict[str, Any] = {
            "metrics": metrics,
            "observers": (RequestLog(logging.INFO),),
        }
        async with speaking(tmp_path, monkeypatch, MARK, **watching) as http:
            says("12")
            body = {"input": "x", "user": "u", "new_1": 1, "reasoning": {"effort": "low"}}
            assert (await http.post(PATH, body)).status_code == 200
            await http.server.at_rest()
            shown = metrics.render().decode()
            for field in ("user", "other", "reasoning_effort"):
                assert f'jaxserve:ignored_fields_total{{field="{field}"}} 1.0' in shown
            assert "new_1" not in shown
            fields = [getattr(record, "fields", {}) for record in caplog.records]
            assert {"user, new_1, reasoning_effort"} == {f["ignored"] for f in fields if f}

    asyncio.run(main())


def test_fields_that_ask_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, MARK) as http:
            says("12")
            nothing: dict[str, Any] = {
                "background": False,
                "top_logprobs": 0,
                "previous_response_id": None,
                "include": [],
                "tools": [],
                "metadata": {"a": "b"},
                "reasoning": {"mode": "standard"},
            }
            response = await http.post(PATH, {"input": "x", **nothing})
            assert response.status_code == 200 and IGNORED not in response.headers
            assert response.json()["metadata"] == {"a": "b"}

    asyncio.run(main())


# ---- conversations


async def prompt_of(http: Http, body: Any) -> str:
    """Return the prompt that a request becomes."""
    seen = list[str]()
    encode = http.server.service.prompts.chat.render

    def rendered(*args: Any, **kwargs: Any) -> Any:
        found = encode(*args, **kwargs)
        seen.append(found.text)
        return found

    http.server.service.prompts.chat.render = rendered  # type: ignore[method-assign]
    response = await http.post(PATH, body)
    assert response.status_code == 200, response.text
    http.server.service.prompts.chat.render = encode  # type: ignore[method-assign]
    return seen[-1]


TOLD = (
    "{% for m in messages %}[{{ m.role }}{{ ' ' + m.reasoning_content if m.reasoning_content }}] "
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %} CALL {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{{ '' if true else '<tool_call><think></think>' }}{% if tools %}{% endif %}"
)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> Callable[[Any], str]:
    """Return the prompt that a request becomes, by a template that shows all of it."""

    def prompt(body: Any) -> str:
        async def main() -> str:
            async with speaking(tmp_path, monkeypatch, "") as http:
                says("12")
                return await prompt_of(http, body)

        return asyncio.run(main())

    import tests.jaxserve.server.http.scripted_model as scripted

    monkeypatch.setattr(scripted, "TURNS", TOLD)
    return prompt


def test_items_of_one_turn_are_one_message(told: Callable[[Any], str]) -> None:
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    second = {**CALL, "call_id": "c2", "namespace": "group"}
    results = [
        {
            "type": "function_call_output",
            "call_id": id,
            "output": [{"type": "input_text", "text": id}],
        }
        for id in ("c1", "c2")
    ]
    items = [{"role": "user", "content": "?"}, thought, said, CALL, second, *results]
    assert told({"input": items, "instructions": "Be.", "tools": [F]}) == (
        "[system] Be.\n[user] ?\n[assistant hm] I look. CALL f {} CALL group__f {}\n"
        "[tool] c1\n[tool] c2\n"
    )


def test_what_is_said_between_calls_is_one_message(told: Callable[[Any], str]) -> None:
    hm = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [
        *({"role": "user", "content": "?"}, hm, {"role": "assistant", "content": "One."}),
        *(CALL, hm, {"role": "assistant", "content": "Two."}, {**CALL, "call_id": "c2"}),
        *({"type": "function_call_output", "call_id": id, "output": id} for id in ("c1", "c2")),
    ]
    assert told({"input": items, "tools": [F]}) == (
        "[user] ?\n[assistant hm\n\nhm] One.\n\nTwo. CALL f {} CALL f {}\n[tool] c1\n[tool] c2\n"
    )


def test_custom_tools_are_functions_of_one_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    custom = {"type": "custom", "name": "patch", "description": "Patches."}
    group = {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [F, {**custom, "name": "p"}],
    }

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, MARK, max_context=2048) as http:
            written = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
            given = json.dumps({"input": 'a\n"b"'})
            says(written % ("patch", given))
            response = await http.client.responses.create(
                model="fake",
                input="?",
                tools=[custom],  # type: ignore[list-item]
            )
            (made,) = response.output
            assert made.type == "custom_tool_call" and made.input == 'a\n"b"'
            says(written % ("agents__p", given) + "\n" + written % ("agents__f", "{}"))
            reply = (await http.post(PATH, {"input": "??", "tools": [group]})).json()
            first, second = reply["output"]
            assert (first["name"], first["namespace"], first["input"]) == ("p", "agents", 'a\n"b"')
            assert (second["name"], second["namespace"]) == ("f", "agents")
            history = [
                *reply["output"],
                {"type": "custom_tool_call_output", "call_id": first["call_id"], "output": "ok"},
                {"type": "function_call_output", "call_id": second["call_id"], "output": "ok"},
            ]
            prompt = await prompt_of(
                http, {"input": [{"role": "user", "content": "??"}, *history], "tools": [group]}
            )
            assert given in prompt and "Other agents." in prompt

    asyncio.run(main())


def test_thoughts_are_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    thinks = "{{ '' if true else '<think></think>' }}" + (
        "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    )

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "", end=thinks) as http:
            says("<think>8, 9, 10.</think>It is 12.")
            body = {"input": "7 plus 5?", "include": ["reasoning.encrypted_content"]}
            thought, _ = (await http.post(PATH, body)).json()["output"]
            sealed = thought["encrypted_content"]
            assert sealed and "8, 9" not in sealed
            asked = {"role": "user", "content": "Sure?"}
            bare = {"type": "reasoning", "id": "x", "summary": [], "encrypted_content": sealed}
            assert "8, 9, 10." in await prompt_of(http, {"input": [asked, bare, asked]})
            changed = sealed[:-6] + ("AAAAAA" if sealed[-6:] != "AAAAAA" else "BBBBBB")
            forged = {**bare, "encrypted_content": changed}
            response = await http.post(PATH, {"input": [asked, forged, asked]})
            assert response.json()["error"]["param"] == "input[1].encrypted_content"
            assert "was changed" in response.text
        async with speaking(tmp_path, monkeypatch, "", end=thinks) as http:  # another key
            response = await http.post(PATH, {"input": [asked, bare, asked]})
            assert "--state-key-file" in response.json()["error"]["message"]
            response = await http.post(PATH, {"input": [asked, thought, asked]})
            assert response.headers[IGNORED] == "input.encrypted_content"

    asyncio.run(main())


# ---- requests as they were recorded

SLOW = ("codex_0.169.0_00", "codex_0.169.0_known_00", "codex_0.169.0_known_11")


@pytest.mark.parametrize(
    "recorded",
    [
        *recordings("codex", SLOW),
        *recordings("sdk_responses"),
        *recordings("opencode_providers_01"),
    ],
)
def test_recorded_requests_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, recorded: Any
) -> None:
    async def main() -> None:
        sizes = {"max_context": 65536, "num_pages": 16384, "step_tokens": 4096}
        async with speaking(tmp_path, monkeypatch, MARK, **sizes) as http:
            says("It is 12.")
            body = filled(recorded["body"]) | {"model": "fake"}
            response = await http.post(PATH, body)
            if "input_image" in str(body["input"]):
                assert response.status_code == 400
                return
            assert response.status_code == 200, response.text
            told = response.text if body.get("stream") else response.json()["output"]
            said = "It is 12." if body.get("max_output_tokens", 9) > 8 else "I"
            assert said in str(told)
            dropped = response.headers.get(IGNORED, "")
            assert ("tools.web_search" in dropped) == ("'web_search'" in str(body.get("tools")))

    asyncio.run(main())


def test_too_long_a_prompt_is_refused_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        rules = ClientRules(least_answer_tokens=64)
        async with serving(tmp_path, rules=rules) as http:
            for tokens, status in ((448, 200), (449, 400)):
                body = {"input": "x" * (tokens - len("user: \n")), "max_output_tokens": 32000}
                response = await http.post(PATH, {**body, "seed": 1, "ignore_eos": True})
                assert response.status_code == status, response.text
                if status == 200:
                    assert response.json()["usage"]["output_tokens"] == 512 - tokens
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded" and error["param"] == "input"
            assert "--least-answer-tokens" in error["message"]
            short = {"input": body["input"], "max_output_tokens": 63}
            assert (await http.post(PATH, short)).status_code == 200

    asyncio.run(main())
