"""Function calls that follow a grammar: required ones, and those of strict tools."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxserve.chat.answers import thought_grammar
from jaxserve.client import AsyncClient
from jaxserve.structure import Structure
from jaxserve.structure.grammars import Grammars
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.server.http.scripted_model import (
    ASKED,
    FORMS,
    PATH,
    MarkedTokenizer,
    Says,
    function,
    speaking,
    with_each_form,
)
from tests.slow_cases import slow_but

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[4]

BOUNDED = {
    "type": "object",
    "properties": {"a": {"enum": [7, 12]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BOTH: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": BOUNDED, "strict": True}}
    for name in ("add", "take")
]


@pytest.mark.parametrize(
    "form", slow_but(list(FORMS), ["hermes", "mistral", "qwen3_coder", "kimi_k2"])
)
def test_a_required_call_is_made_and_follows_its_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str
) -> None:
    """The device would say anything; the grammar alone restricts its tokens."""
    take = {"type": "function", "function": {"name": "take"}}

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, FORMS[form][0], max_context=1024) as http:
            for choice, parallel in (("required", False), ("required", True), (take, False)):
                for seed in range(4):
                    body = {
                        "messages": ASKED,
                        "tools": BOTH,
                        "tool_choice": choice,
                        "seed": seed,
                        "max_tokens": 500,
                    }
                    body["parallel_tool_calls"] = parallel
                    response = await http.post(PATH, body)
                    assert response.status_code == 200, response.text
                    (answer,) = response.json()["choices"]
                    if parallel and answer["finish_reason"] == "length":
                        continue  # one call after the other
                    assert (
                        answer["finish_reason"] == "tool_calls" and not answer["message"]["content"]
                    ), answer
                    calls = [call["function"] for call in answer["message"]["tool_calls"]]
                    assert len(calls) == 1 or parallel
                    for call in calls:
                        assert call["name"] in (
                            {"add", "take"} if choice == "required" else {"take"}
                        )
                        jsonschema.validate(json.loads(call["arguments"]), BOUNDED)
            async with AsyncClient(http.server.address) as client:
                functions = [tool["function"] for tool in BOTH]
                one = {"tools": functions, "tool_name": "take", "parallel_tool_calls": False}
                (call,) = (await client.chat(ASKED, **one)).choices[0].tool_calls  # type: ignore[arg-type]
                assert call.name == "take"

    asyncio.run(main())


# Mistral without parallel calls is the exception.
@pytest.mark.parametrize(("form", "parallel"), with_each_form([False, True]))
def test_a_strict_call_that_the_model_begins_follows_its_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str, parallel: bool
) -> None:
    """Text around the call is free, and so are arguments of a function that is not strict."""
    mark, written, _ = FORMS[form]
    grammars = list[str]()
    compiled = Grammars.compile
    monkeypatch.setattr(
        Grammars,
        "compile",
        lambda self, asked: grammars.append(asked.text) or compiled(self, asked),
    )
    body = {
        "messages": ASKED,
        "tools": [BOTH[0], function(name="free")["tools"][0]],
        "max_tokens": 2,
    }
    body["parallel_tool_calls"] = parallel

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark + "</think>", max_context=1024) as http:
            # Thoughts end with a token and come first, whatever calls begin with.
            response = await http.post(PATH, body)
            assert response.status_code == (400 if form == "llama" else 200), response.text
        async with speaking(tmp_path, monkeypatch, mark, max_context=1024) as http:
            response = await http.post(PATH, body)
            if form == "llama":
                assert response.status_code == 400 and response.json()["error"]["param"] == "tools"
                return
            assert response.status_code == 200, response.text
            library = http.server.service.prompts.grammars
            grammar = compiled(library, Structure("lark", grammars[-1], "tools"))

            def fits(text: str) -> bool:
                tokens = [*MarkedTokenizer().ids(text), *ByteTokenizer.eos_ids]
                return grammar.matcher().fits(tokens) == len(tokens)

            right = written('{"a": 7, "b": 5}')
            assert all(map(fits, ("", "I add.", right, f"I add.\n{right}", f"{right} Done.")))
            # As text, its mark is free again.
            assert fits(f"{right} And: {right}") == (parallel or form != "mistral")
            other = written('{"x": [1]}')
            assert fits(right.replace("add", "free")) and fits(other.replace("add", "free"))
            wrong = (
                written('{"a": 8, "b": 5}'),
                written('{"a": 7}'),
                right.replace("add", "other"),
            )
            assert not any(map(fits, wrong))

    asyncio.run(main())


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "minimax_m2"])
def test_a_schema_that_the_form_cannot_follow_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str
) -> None:
    parameters = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    words = "parameters of 'f': 'day' has the format 'date'"

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, FORMS[form][0]) as http:
            says("x")
            body = {"messages": ASKED} | function(parameters=parameters)
            strict = {"messages": ASKED} | function(parameters=parameters, strict=True)
            for refused in (body | {"tool_choice": "required"}, strict):
                response = await http.post(PATH, refused)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, "tools"), error
                assert words in error["message"] and '"auto"' in error["message"]
            assert (await http.post(PATH, body)).status_code == 200

    asyncio.run(main())


def test_a_required_call_is_one_of_the_allowed_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    take = [{"type": "function", "function": {"name": "take"}}]
    allowed = {"mode": "required", "tools": take}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "<tool_call>", max_context=1024) as http:
            for seed in range(4):
                body = {"messages": ASKED, "tools": BOTH, "tool_choice": choice, "seed": seed}
                response = await http.post(
                    PATH, body | {"max_tokens": 500, "parallel_tool_calls": False}
                )
                (answer,) = response.json()["choices"]
                (call,) = answer["message"]["tool_calls"]
                assert call["function"]["name"] == "take"

    asyncio.run(main())


@pytest.mark.parametrize("end", ["</think>", "</thought>"])
def test_a_required_call_comes_after_the_thought_that_the_prompt_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, end: str
) -> None:
    monkeypatch.setattr(thought_grammar, "CLOSE", end)  # a special token, or text
    grammars = list[Structure]()
    compiled = Grammars.compile
    monkeypatch.setattr(
        Grammars,
        "compile",
        lambda self, asked: grammars.append(asked) or compiled(self, asked),
    )

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "<tool_call></think>", end="<think>\n") as http:
            grammar = (
                await http.post(
                    PATH,
                    {"messages": ASKED, "tools": BOTH, "tool_choice": "required", "max_tokens": 3},
                ),
            )
            assert grammar[0].status_code == 200, grammar[0].text
            library = http.server.service.prompts.grammars
            matcher = compiled(library, grammars[0]).matcher()
            call = '{"name": "add", "arguments": {"a": 7, "b": 5}}'
            text = f"7 and 5{end}\n\n<tool_call>\n{call}\n</tool_call>"
            tokens = MarkedTokenizer().ids(text)
            assert matcher.fits(tokens) == len(tokens)
            unfinished = MarkedTokenizer().ids("7 and 5")
            assert matcher.fits([*unfinished, *ByteTokenizer.eos_ids]) == len(unfinished)
            await http.post(
                PATH,
                {"messages": ASKED, "response_format": {"type": "json_object"}, "max_tokens": 2},
            )
            matcher = compiled(library, grammars[1]).matcher()
            whole = MarkedTokenizer().ids(f'7 and {{"a"{end}\n\n{{"a": 1}}')
            assert matcher.fits(whole) == len(whole)
            assert matcher.fits(MarkedTokenizer().ids(f"7{end}7")) == 1 + (
                1 if end == "</think>" else len(end)
            )

    asyncio.run(main())
