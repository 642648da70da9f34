"""Fields that say how to think, over HTTP, as the clients write them that send them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.jaxserve.server.http.harness import serving
from tests.jaxserve.server.http.scripted_model import (
    ADD,
    ARGUMENTS,
    ASKED,
    PATH,
    Says,
    joined,
    speaking,
)

pytestmark = pytest.mark.system
# As of Qwen3: without a thought, an empty one ends the prompt.
QWEN = (
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{{ '' if true else '<think></think>' }}"
)
THOUGHT = "<think>\n7, and 5 more: 8, 9, 10, 11, 12.\n</think>\n\nIt is 12."


def ask(**fields: Any) -> dict[str, Any]:
    return {"messages": ASKED, "max_tokens": 100, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "adaptive"}, "enable_thinking": False},
    ],
)
def test_a_thought_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, fields: dict[str, Any]
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "", end=QWEN) as http:
            prompts = [
                (await http.post("/tokenize", {"messages": ASKED, **each})).json()["count"]
                for each in (fields, {})
            ]
            assert prompts[0] - prompts[1] == len("<think>\n\n</think>\n\n")
            says("12")
            response = await http.post(PATH, ask(**fields))
            assert response.json()["usage"]["prompt_tokens"] == prompts[0]
            assert "jaxserve-ignored" not in response.headers

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields", [{"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking_budget": 9}]
)
def test_a_thought_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, fields: dict[str, Any]
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "", end=QWEN) as http:
            says(THOUGHT)
            whole = (await http.post(PATH, ask())).json()["choices"][0]["message"]
            assert whole["reasoning_content"] == "7, and 5 more: 8, 9, 10, 11, 12."
            reply = (await http.post(PATH, ask(**fields))).json()["choices"][0]["message"]
            # The mark that begins the thought does not count, its line end does.
            assert (reply["reasoning_content"], reply["content"]) == ("7, and 5", "It is 12.")
            chunks = await http.client.chat.completions.create(
                model="fake", messages=ASKED, max_tokens=100, stream=True, extra_body=fields
            )
            found = joined([chunk.to_dict() async for chunk in chunks])
            assert found[:2] == ("It is 12.", "7, and 5")
            long = fields | (
                {"thinking_budget": 90}
                if "thinking_budget" in fields
                else {"thinking": {"type": "enabled", "budget_tokens": 90}}
            )
            assert (await http.post(PATH, ask(**long))).json()["choices"][0]["message"] == whole

    asyncio.run(main())


HARMONY = (
    "<|channel|>analysis<|message|>7, and 5 more.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 7, "b": 5}'
)


def test_channels_of_harmony(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "<|channel|><|message|>") as http:
            says(HARMONY)
            body = ask(tools=[ADD], max_tokens=300)
            choice = (await http.post(PATH, body)).json()["choices"][0]
            message = choice["message"]
            assert message["reasoning_content"] == "7, and 5 more."
            assert message["content"] == "I add." and choice["finish_reason"] == "tool_calls"
            assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": ARGUMENTS}
            chunks = await http.client.chat.completions.create(
                model="fake", messages=ASKED, max_tokens=300, stream=True, tools=[ADD]
            )
            *parts, calls, reason = joined([chunk.to_dict() async for chunk in chunks])
            assert parts == ["I add.", "7, and 5 more."] and reason == "tool_calls"
            assert [(call["name"], call["arguments"]) for call in calls] == [("add", ARGUMENTS)]
            # Without functions a call is text; without thoughts apart, they are text before it.
            says(HARMONY)
            plain = (await http.post(PATH, ask(max_tokens=300, separate_reasoning=False))).json()
            assert plain["choices"][0]["message"]["content"] == (
                "7, and 5 more.\n\nI add.<|start|>assistant<|channel|>commentary to=functions.add "
                '<|constrain|>json<|message|>{"a": 7, "b": 5}'
            )

    asyncio.run(main())


def test_what_has_no_effect_is_named(tmp_path: Path) -> None:
    fields = {
        "reasoning_effort": "low",
        "verbosity": "medium",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "chat_template_kwargs": {"custom": 1, "no name": 2},
        "user": "me",
    }

    async def main() -> None:
        async with serving(tmp_path) as http:
            for stream in (False, True):
                response = await http.post(PATH, ask(**fields, max_tokens=2, stream=stream))
                assert response.status_code == 200, response.text
                assert response.headers["jaxserve-ignored"].split(", ") == [
                    "user",
                    "reasoning_effort",
                    "thinking.type",
                    "verbosity",
                    "chat_template_kwargs.custom",
                    "thinking.budget_tokens",
                    "...",
                ]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": ["enabled"]}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "x": 9}}, "thinking.x"),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, "thinking.type"),
        ({"thinking_token_budget": 9}, "thinking_token_budget"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_what_is_refused(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            response = await http.post(PATH, ask(**fields))
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param

    asyncio.run(main())


def test_what_has_no_effect_may_be_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            http.server.service.prompts.chat.unknown_fields = "error"
            response = await http.post(PATH, ask(verbosity="low"))
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "verbosity"
            assert "has no effect" in response.json()["error"]["message"]

    asyncio.run(main())


def test_tokenize_names_fields_as_the_body_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            thinking = {"type": "enabled", "budget_tokens": 0}
            response = await http.post("/tokenize", {"messages": ASKED, "thinking": thinking})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "thinking.budget_tokens"

    asyncio.run(main())


def test_options_are_for_conversations(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            body = {"prompt": "a", "enable_thinking": True}
            response = await http.post("/tokenize", body)
            assert response.status_code == 400 and "chat template" in response.text
            response = await http.post("/v1/completions", body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "enable_thinking"

    asyncio.run(main())
