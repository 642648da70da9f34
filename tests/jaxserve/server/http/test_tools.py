"""Function calls and reasoning over HTTP and gRPC, on a device that says what a test wants."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI

from jaxserve.client import AsyncClient, Delta, ToolCall, join
from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from tests import fake_model
from tests.jaxserve.server import harness
from tests.jaxserve.server.http.harness import serving
from tests.jaxserve.server.http.scripted_model import (
    ADD,
    ARGUMENTS,
    ASKED,
    FORMS,
    PATH,
    SCHEMA,
    SPECIAL,
    MarkedTokenizer,
    Says,
    function,
    joined,
    speaking,
    with_each_form,
)
from tests.slow_cases import slow_but

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(("form", "before"), with_each_form(["", "I add.\n"]))
def test_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str, before: str
) -> None:
    mark, call, _ = FORMS[form]

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark) as http:
            says(before + call(ARGUMENTS))
            create = http.client.chat.completions.create
            asked: dict[str, Any] = {"model": "fake", "messages": ASKED, "tools": [ADD]}
            choice = (await create(**asked)).choices[0]
            assert (
                choice.message.content == (before.strip() or None)
                and choice.finish_reason == "tool_calls"
            )
            (made,) = choice.message.tool_calls or []
            assert (made.type, made.function.name, made.function.arguments) == (
                "function",
                "add",
                ARGUMENTS,
            )
            *chunks, done = await http.events(PATH, asked)
            content, _, calls, reason = joined(chunks)
            assert (content, reason, done) == (before.strip(), "tool_calls", "[DONE]")
            assert [(c["name"], c["arguments"]) for c in calls] == [("add", ARGUMENTS)]
            async with http.client.chat.completions.stream(**asked) as stream:
                final = (await stream.get_final_completion()).choices[0]
            assert (
                final.message.tool_calls
                and final.message.tool_calls[0].function.arguments == ARGUMENTS
            )
            for off in ({}, {"tools": []}, {"tools": [ADD], "tool_choice": "none"}):
                message = (await create(**asked | {"tools": None} | off)).choices[0].message
                hidden = (
                    [mark for mark in SPECIAL if mark in call(ARGUMENTS)]
                    if form != "hermes"
                    else []
                )
                told = before + call(ARGUMENTS)
                for mark_of_form in hidden:
                    told = told.replace(mark_of_form, "")
                assert message.content == told and not message.tool_calls, "nobody offered anything"
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize(("form", "parallel"), with_each_form([True, False, None]))
def test_two_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str, parallel: bool | None
) -> None:
    mark, call, two = FORMS[form]

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark) as http:
            says(two.format(call(ARGUMENTS), (call(ARGUMENTS)).replace("<|python_tag|>", "")))
            body = {"messages": ASKED, "tools": [ADD], "parallel_tool_calls": parallel}
            message = (await http.post(PATH, body)).json()["choices"][0]["message"]
            count = 1 if parallel is False else 2
            assert [c["function"]["arguments"] for c in message["tool_calls"]] == [
                ARGUMENTS
            ] * count
            assert (
                len({c["id"] for c in message["tool_calls"]}) == count
                and message["content"] is None
            )
            *chunks, _ = await http.events(PATH, body)
            assert len(joined(chunks)[2]) == count

    asyncio.run(main())


def holding_back(monkeypatch: pytest.MonkeyPatch, last: int) -> threading.Event:
    """Let the model write its token number `last` of an answer once the event is set."""
    goes_on = threading.Event()
    choose = fake_model.Rules.choose

    def wait(rules: fake_model.Rules, total: int, position: int, *rest: Any) -> int:
        if position - rules.end_after == last:
            goes_on.wait(60)
        return choose(rules, total, position, *rest)

    monkeypatch.setattr(fake_model.Rules, "choose", wait)
    return goes_on


@pytest.mark.parametrize(("form", "why"), with_each_form(["required", "strict"]))
def test_a_call_that_follows_a_grammar_is_told_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str, why: str
) -> None:
    """A client has arguments before the model has written the last token of the call."""
    mark, call, _ = FORMS[form]
    # The grammar of required calls has no mark of its own before those of llama.
    text = call(ARGUMENTS).removeprefix("<|python_tag|>")
    body: dict[str, Any] = {"messages": ASKED, "tools": [ADD], "tool_choice": "required"}
    if why == "strict":
        strict = function(name="add", parameters=SCHEMA | {"required": ["a", "b"]}, strict=True)
        body |= strict | {"tool_choice": "auto" if form != "llama" else "required"}

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark, max_context=2048) as http:
            says(text)
            goes_on = holding_back(monkeypatch, len(MarkedTokenizer().ids(text)) - 1)
            chunks: list[Any] = []
            pieces: list[str] = []
            early = 0
            stream = await http.client.chat.completions.create(model="fake", stream=True, **body)
            async for chunk in stream:
                chunks.append(chunk.model_dump(exclude_unset=True))
                for event in chunk.choices[0].delta.tool_calls or []:
                    assert event.function
                    pieces.append(event.function.arguments or "")
                    if any(pieces) and not goes_on.is_set():
                        early = len(pieces)
                        goes_on.set()
            assert early, "no arguments came while the call was being written"
            content, _, calls, reason = joined(chunks)
            assert (content, reason) == ("", "tool_calls") and len(pieces) > 2
            message = (await http.post(PATH, body)).json()["choices"][0]["message"]
            (made,) = message["tool_calls"]
            assert made["function"] == {"name": "add", "arguments": ARGUMENTS}
            assert message["content"] is None
            assert [(c["name"], c["arguments"]) for c in calls] == [("add", "".join(pieces))]
            assert "".join(pieces) == ARGUMENTS
            free = {"messages": ASKED, "tools": [ADD]}
            *chunks, _ = await http.events(PATH, free)
            deltas = [chunk["choices"][0]["delta"].get("tool_calls", []) for chunk in chunks]
            assert [len(delta) for delta in deltas if delta] == [1, 1], (
                "the name, and all arguments"
            )
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("form", slow_but(list(FORMS), ["llama", "mistral", "glm45", "kimi_k2"]))
def test_a_required_call_that_is_cut_is_told_as_far_as_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str
) -> None:
    mark, call, _ = FORMS[form]
    text = call(ARGUMENTS).removeprefix("<|python_tag|>")
    # Behind the second parameter's name in every form.
    tokens = len(MarkedTokenizer().ids(text[: text.rindex("5")]))
    body = {"messages": ASKED, "tools": [ADD], "tool_choice": "required", "max_tokens": tokens}

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark, max_context=2048) as http:
            says(text)
            (choice,) = (await http.post(PATH, body)).json()["choices"]
            (made,) = choice["message"]["tool_calls"]
            arguments = made["function"]["arguments"]
            assert arguments.startswith('{"a": 7') and ARGUMENTS.startswith(arguments)
            assert not arguments.endswith("}")
            assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
            *chunks, _ = await http.events(PATH, body)
            content, _, calls, reason = joined(chunks)
            assert (content, reason) == ("", "length")
            assert [(c["name"], c["arguments"]) for c in calls] == [("add", arguments)]
            async with AsyncClient(http.server.address) as client:
                options: dict[str, Any] = {"tools": [ADD["function"]], "tool_name": "add"}
                options["max_tokens"] = tokens
                (whole,) = (await client.chat(ASKED, **options)).choices[0].tool_calls
                events = [event async for event in client.chat_stream(ASKED, **options)]
                (streamed,) = join(events).choices[0].tool_calls
                assert whole.arguments == streamed.arguments == arguments
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["", "{{ '<think>\n' }}"])
def test_thoughts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, end: str) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "</think><tool_call>", end=end) as http:
            thought = "7 + 5,\n<tool_call>?"
            says(
                ("" if end else "<think>\n")
                + thought
                + "\n</think>\n\n12"
                + FORMS["hermes"][1](ARGUMENTS)
            )
            body = {"messages": ASKED, "tools": [ADD]}
            message = (await http.post(PATH, body)).json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == (thought, "12")
            assert message["tool_calls"][0]["function"]["name"] == "add"
            *chunks, _ = await http.events(PATH, body)
            content, reasoning, calls, reason = joined(chunks)
            assert (content, reasoning, len(calls), reason) == ("12", thought, 1, "tool_calls")
            message = (
                await http.post(PATH, {"messages": ASKED, "separate_reasoning": False})
            ).json()["choices"][0]
            assert thought + "\n</think>\n\n12<tool_call>" in message["message"]["content"]
            assert "reasoning_content" not in message["message"]
            async with AsyncClient(http.server.address) as client:
                tool = ADD["function"]
                result = await client.chat(ASKED, tools=[tool])
                (choice,) = result.choices
                (made,) = choice.tool_calls
                assert (choice.text, choice.reasoning_content, choice.finish_reason) == (
                    "12",
                    thought,
                    "tool_calls",
                )
                assert (made.name, made.arguments) == ("add", ARGUMENTS)
                events = [
                    event async for event in client.chat_stream(ASKED, tools=[tool], logprobs=0)
                ]
                (again,) = join(events).choices
                assert (again.text, again.reasoning_content, again.finish_reason) == (
                    "12",
                    thought,
                    "tool_calls",
                )
                assert [(c.name, c.arguments) for c in again.tool_calls] == [("add", ARGUMENTS)]
                assert again.token_ids == choice.token_ids and len(again.logprobs) == len(
                    again.token_ids
                )
                assert (
                    sum(bool(event.tool_calls) for event in events if isinstance(event, Delta)) == 1
                )
                echo = (await client.chat(ASKED, echo=True)).choices[0]
                assert thought in echo.text and not echo.reasoning_content
            await http.server.at_rest()

    asyncio.run(main())


def test_what_was_called_goes_back_to_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "<tool_call>") as http:
            says("12")
            call = {
                "id": "a1B2c3D4e",
                "type": "function",
                "function": {"name": "add", "arguments": ARGUMENTS},
            }
            messages = [
                *ASKED,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a1B2c3D4e", "content": "12"},
            ]
            body: dict[str, Any] = {"messages": messages, "tools": [ADD]}
            reply = await http.client.chat.completions.create(model="fake", **body)
            assert (
                reply.choices[0].message.content == "12"
                and reply.choices[0].finish_reason == "stop"
            )
            rendered = (
                json.dumps([ADD]) + f"user: 7 plus 5?\nassistant: CALL{ARGUMENTS}\ntool: 12\n"
            )
            assert reply.usage and reply.usage.prompt_tokens == len(rendered)
            async with AsyncClient(http.server.address) as client:
                made = ToolCall(id="a1B2c3D4e", name="add", arguments=ARGUMENTS)
                turns = [*ASKED, {"role": "assistant", "tool_calls": [made]}, {**messages[2]}]
                result = await client.chat(turns, tools=[ADD["function"]])
                assert result.usage.prompt_tokens == len(rendered)
                assert (await client.tokenize(turns)).prompt == rendered.removeprefix(
                    json.dumps([ADD])
                )

    asyncio.run(main())


@pytest.mark.parametrize(("form", "nested"), with_each_form([False, True]))
def test_only_allowed_tools_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str, nested: bool
) -> None:
    mark, call, _ = FORMS[form]
    other = {"type": "function", "function": {"name": "other"}}

    def choice(name: str) -> dict[str, Any]:
        tool: dict[str, Any] = {"name": name}
        tools = {"mode": "auto", "tools": [{"type": "function", "function": tool}]}
        if nested:
            return {"type": "allowed_tools", "allowed_tools": tools}
        return {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", **tool}]}

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark) as http:
            says(call(ARGUMENTS))
            asked: dict[str, Any] = {"messages": ASKED, "tools": [ADD, other]}
            free = (await http.post(PATH, asked)).json()
            for name in ("add", "other"):
                reply = (await http.post(PATH, asked | {"tool_choice": choice(name)})).json()
                message = reply["choices"][0]["message"]
                assert reply["usage"]["prompt_tokens"] == free["usage"]["prompt_tokens"]
                if name == "add":
                    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
                else:
                    assert not message.get("tool_calls") and "add" in message["content"]
                *chunks, _ = await http.events(PATH, asked | {"tool_choice": choice(name)})
                assert len(joined(chunks)[2]) == (name == "add")

    asyncio.run(main())


def test_an_id_that_the_model_wrote_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    mark, call, two = FORMS["kimi_k2"]

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark) as http:
            says(two.format(call(ARGUMENTS)).replace("add:0", "add:7", 1))
            asked = {"messages": ASKED, "tools": [ADD]}
            message = (await http.post(PATH, asked)).json()["choices"][0]["message"]
            ids = ["functions.add:7", "functions.add:0"]
            assert [made["id"] for made in message["tool_calls"]] == ids
            *chunks, _ = await http.events(PATH, asked)
            assert [made["id"] for made in joined(chunks)[2]] == ids

    asyncio.run(main())


def test_langchain_calls_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "<tool_call>") as http:
            says("I add." + FORMS["hermes"][1](ARGUMENTS))
            model = ChatOpenAI(
                model="fake",
                base_url=f"{http.base}/v1",
                api_key="none",  # type: ignore[arg-type]
                max_retries=0,
                timeout=60,
                http_async_client=http.raw,
            ).bind_tools([ADD])
            reply = await model.ainvoke("7 plus 5?")
            (call,) = reply.tool_calls
            assert (call["name"], call["args"]) == (
                "add",
                {"a": 7, "b": 5},
            ) and reply.content == "I add."
            says("12")
            result = {"role": "tool", "content": "12", "tool_call_id": call["id"]}
            assert (await model.ainvoke([("user", "7 plus 5?"), reply, result])).content == "12"

    asyncio.run(main())


def test_the_example_of_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    section = (
        (ROOT / "docs" / "clients.md")
        .read_text(encoding="utf-8")
        .split("### Calls of functions")[1]
    )
    example = section.split("```python\n")[1].split("```")[0]
    assert "http://127.0.0.1:8000" in example

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "<tool_call>", max_context=2048) as http:
            says(FORMS["hermes"][1](ARGUMENTS), later="7 plus 5 is 12.")
            file = tmp_path / "example.py"
            file.write_text(
                example.replace("http://127.0.0.1:8000", http.base).replace("Qwen3-0.6B", "fake")
            )
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(file), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            out, _ = await process.communicate()
            assert out.decode() == "add {'a': 7, 'b': 5}\n7 plus 5 is 12.\n"

    asyncio.run(main())


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"properties": DEEP}


def allowing(mode: str | None, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
    return {"tool_choice": choice if mode else {"type": "allowed_tools"}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        function(parameters={"properties": {"a": {"uniqueItems": True}}})
        | {"tool_choice": "required"},
        "tools",
        "/properties/a/uniqueItems cannot be followed",
    ),
    (
        function() | {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "none of the tools",
    ),
    (
        function() | {"tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "together with calls that have to be made",
    ),
    (function() | allowing(None), "tool_choice.mode", 'is None; it must be "auto" or "required"'),
    (function() | allowing("none", "f"), "tool_choice.mode", "is 'none'"),
    (function() | allowing("auto"), "tool_choice.tools", "at least one"),
    (function() | allowing("auto", "f", "g"), "tool_choice.tools[1].name", "none of the tools"),
    (allowing("required", "f"), "tool_choice", "without tools"),
    (allowing("auto", "f"), "tool_choice.tools[0].name", "none of the tools"),
    (
        function() | {"tool_choice": {"type": "allowed_tools", "allowed_tools": []}},
        "tool_choice.allowed_tools",
        "an object",
    ),
    (
        function()
        | {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": 5}}},
        "tool_choice.allowed_tools.tools",
        "a list",
    ),
    (
        function() | {"tool_choice": allowing("auto", "f")["tool_choice"] | {"strict": True}},
        "tool_choice.strict",
        "not a field",
    ),
    (
        function()
        | {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "name": "f"}]},
            }
        },
        "tool_choice.allowed_tools.tools[0].type",
        'only "function"',
    ),
    (
        function()
        | {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": 5}}],
                },
            }
        },
        "tool_choice.allowed_tools.tools[0].function.name",
        "is 5",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}]},
        "messages[0].tool_calls[0].type",
        'only "function"',
    ),
    (function() | {"tool_choice": "sometimes"}, "tool_choice", "only"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    (function() | {"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"tools": {}}, "tools", "list"),
    ({"tools": ["f"]}, "tools[0]", "dictionary"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", 'only "function"'),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "no object"),
    (function(name=""), "tools[0].function.name", "1 to 128"),
    (function(name="a b"), "tools[0].function.name", "1 to 128"),
    (function(name="x" * 129), "tools[0].function.name", "1 to 128"),
    (function(description=5), "tools[0].function.description", "string"),
    (function(parameters=[]), "tools[0].function.parameters", "JSON schema"),
    (
        function(parameters=DEEP),
        "tools[0].function.parameters" + ".properties" * 33,
        "more than 32 deep",
    ),
    (function(strict="no"), "tools[0].function.strict", "true or false"),
    (function(returns="x"), "tools[0].function.returns", "not a field"),
    (
        {"tools": [*function()["tools"], *function()["tools"]]},
        "tools[1].function.name",
        "another function",
    ),
    ({"tools": [function(name=f"f{i}")["tools"][0] for i in range(9)]}, "tools", "--max-tools"),
    (function(description="x" * 3000), "tools", "--max-tool-bytes"),
]


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    async def main() -> None:
        limits = Limits(max_tools=8, max_tool_bytes=2000)
        async with speaking(tmp_path, monkeypatch, "<tool_call>", limits=limits) as http:
            says("x")
            for body, param, words in REFUSED:
                response = await http.post(PATH, {"messages": ASKED} | body)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, param), (body, error)
                assert words in error["message"], error
            call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
            for arguments in ("{", "7", '{"a": NaN}', '{"a":' * 99 + "1" + "}" * 99):
                call["function"]["arguments"] = arguments  # type: ignore[index]
                response = await http.post(
                    PATH, {"messages": [{"role": "assistant", "tool_calls": [call]}]}
                )
                assert (
                    response.json()["error"]["param"]
                    == "messages[0].tool_calls[0].function.arguments"
                )
            async with AsyncClient(http.server.address) as client:
                tool = ADD["function"]
                refused: list[tuple[str, dict[str, Any]]] = [
                    ("tool_name", {"tools": [tool], "tool_name": "nobody"}),
                    ("tools[0].name", {"tools": [tool | {"name": "a b"}]}),
                    ("tools[0].parameters", {"tools": [tool | {"parameters": [1]}]}),
                    ("sampling.echo", {"tools": [tool], "echo": True}),
                    ("tools", {"tools": [tool | {"name": f"f{i}"} for i in range(9)]}),
                ]
                for field, options in refused:
                    with pytest.raises(RequestError) as caught:
                        await client.chat(ASKED, **options)
                    assert caught.value.field == field
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].content }}<tool_call>", "the chat template of .* takes no tools"),
        ("{{ tools }}{{ messages[0].content }}", "--tool-parser"),
    ],
)
def test_a_model_without_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, template: str, words: str
) -> None:
    monkeypatch.setattr(harness, "TEMPLATE", template)

    async def main() -> None:
        async with serving(tmp_path) as http:
            says("x")
            response = await http.post(PATH, {"messages": ASKED, "tools": [ADD]})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tools"), error
            with pytest.raises(RequestError, match=words):
                async with AsyncClient(http.server.address) as client:
                    await client.chat(ASKED, tools=[ADD["function"]])
            fine = await http.post(PATH, {"messages": ASKED, "tools": [ADD], "tool_choice": "none"})
            assert fine.json()["choices"][0]["message"]["content"] == "x"

    asyncio.run(main())
