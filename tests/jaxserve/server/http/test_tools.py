"""Function calls and reasoning over HTTP and gRPC, on a device that says what a test wants."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest
from langchain_openai import ChatOpenAI

from jaxserve.chat import chat
from jaxserve.client import AsyncClient, Delta, ToolCall, join
from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.structure import Structure
from jaxserve.structure.grammars import Grammars
from tests import fake_model
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.server import harness
from tests.jaxserve.server.http.harness import Http, serving

ROOT = Path(__file__).parents[4]
PATH = "/v1/chat/completions"
SPECIAL = MappingProxyType(
    {"[TOOL_CALLS]": 258, "[ARGS]": 259, "<|python_tag|>": 260, "<think>": 261, "</think>": 262}
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "a + b", "parameters": SCHEMA},
}
ASKED: list[Any] = [{"role": "user", "content": "7 plus 5?"}]
ARGUMENTS = '{"a": 7, "b": 5}'
TURNS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ "
    "m.content or '' }}"
    "{% for call in m.tool_calls or [] %}CALL{{ call.function.arguments | tojson }}{% endfor "
    "%}{{ '\n' }}{% endfor %}"
)
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
FORMS = {  # the template's mark, one call as the model writes it, and two
    "hermes": (
        "<tool_call>",
        '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>',
        "{0}\n{0}",
    ),
    "llama": (
        "<|start_header_id|>tool_calls",
        '<|python_tag|>{"name": "add", "parameters": %s}',
        "{0}; {1}",
    ),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]add[ARGS]%s", "{0}{0}"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        SECTION.format("<｜tool▁call▁begin｜>add<｜tool▁sep｜>%s<｜tool▁call▁end｜>"),
        "{0}{0}",
    ),
}


class MarkedTokenizer(ByteTokenizer):
    """A tokenizer with more special tokens, which a text shows only on request."""

    vocab_size = 263
    special_tokens = MappingProxyType({**ByteTokenizer.special_tokens, **SPECIAL})

    def token_text(self, token_id: int) -> str:
        return {id: name for name, id in SPECIAL.items()}.get(token_id) or super().token_text(
            token_id
        )

    def ids(self, text: str) -> list[int]:
        """Encode a text in which marks are single tokens, as a model writes them."""
        found: list[int] = []
        while text:
            name = next((name for name in SPECIAL if text.startswith(name)), None)
            found += [SPECIAL[name]] if name else text[0].encode()
            text = text[len(name or text[0]) :]
        return found


Says = Callable[..., None]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Set the answer to the first prompt, and to prompts of other lengths if it differs."""

    def say(text: str, later: str | None = None) -> None:
        scripts = [
            [*MarkedTokenizer().ids(t), *ByteTokenizer.eos_ids]
            for t in (text, text if later is None else later)
        ]
        prompts: list[int] = []

        def choose(
            rules: fake_model.Rules, total: int, position: int, penalty: int, mask: object = None
        ) -> int:
            prompts.append(rules.end_after)
            script = scripts[rules.end_after != prompts[0]]
            return script[min(position - rules.end_after, len(script) - 1)]

        monkeypatch.setattr(fake_model.Rules, "choose", choose)

    monkeypatch.setattr(harness, "ByteTokenizer", MarkedTokenizer)
    return say


@asynccontextmanager
async def speaking(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mark: str, **options: Any
) -> AsyncIterator[Http]:
    """Serve a model whose template has the mark in a comment, which selects the format."""
    monkeypatch.setattr(
        harness, "TEMPLATE", TURNS + "{{ '' if true else '" + mark + "' }}" + options.pop("end", "")
    )
    async with serving(folder, **options) as http:
        yield http


def joined(chunks: list[Any]) -> tuple[str, str, list[dict[str, str]], str]:
    """Return content, reasoning, calls and finish reason of choice 0 of a stream."""
    content = ""
    reasoning = ""
    reason = ""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content", "")
        for news in delta.get("tool_calls", []):
            if news["index"] == len(calls):
                assert news["type"] == "function" and news["function"]["arguments"] == "", (
                    "the name comes first"
                )
                calls.append({"id": news["id"], "name": news["function"]["name"], "arguments": ""})
            else:
                assert set(news) == {"index", "function"} and set(news["function"]) == {"arguments"}
                calls[news["index"]]["arguments"] += news["function"]["arguments"]
        reason = chunk["choices"][0]["finish_reason"] or reason
    return content, reasoning, calls, reason


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("before", ["", "I add.\n"])
def test_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str, before: str
) -> None:
    mark, call, _ = FORMS[form]

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark) as http:
            says(before + call % ARGUMENTS)
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
                hidden = [mark for mark in SPECIAL if mark in call] if form != "hermes" else []
                told = before + call % ARGUMENTS
                for mark_of_form in hidden:
                    told = told.replace(mark_of_form, "")
                assert message.content == told and not message.tool_calls, "nobody offered anything"
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("parallel", [True, False, None])
def test_two_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str, parallel: bool | None
) -> None:
    mark, call, two = FORMS[form]

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark) as http:
            says(two.format(call % ARGUMENTS, (call % ARGUMENTS).replace("<|python_tag|>", "")))
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


@pytest.mark.parametrize("end", ["", "{{ '<think>\n' }}"])
def test_thoughts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, end: str) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "</think><tool_call>", end=end) as http:
            thought = "7 + 5,\n<tool_call>?"
            says(
                ("" if end else "<think>\n")
                + thought
                + "\n</think>\n\n12"
                + FORMS["hermes"][1] % ARGUMENTS
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


def test_langchain_calls_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "<tool_call>") as http:
            says("I add." + FORMS["hermes"][1] % ARGUMENTS)
            model = ChatOpenAI(
                model="fake",
                base_url=f"{http.base}/v1",
                api_key="none",  # type: ignore[arg-type]
                max_retries=0,
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
            says(FORMS["hermes"][1] % ARGUMENTS, later="7 plus 5 is 12.")
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


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"properties": DEEP}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        function(parameters={"not": {}}) | {"tool_choice": "required"},
        "tools",
        'Unimplemented keys: ["not"]',
    ),
    (
        function() | {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "none of the tools",
    ),
    (
        function() | {"tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
        "together with calls that follow a grammar",
    ),
    (function() | {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "only"),
    (function() | {"tool_choice": "sometimes"}, "tool_choice", "only"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    (function() | {"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"tools": {}}, "tools", "list"),
    ({"tools": ["f"]}, "tools[0]", "dictionary"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", 'only "function"'),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "no object"),
    (function(name=""), "tools[0].function.name", "1 to 64"),
    (function(name="a b"), "tools[0].function.name", "1 to 64"),
    (function(name="x" * 65), "tools[0].function.name", "1 to 64"),
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


@pytest.mark.parametrize("form", list(FORMS))
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


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("parallel", [True, False])
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
            response = await http.post(PATH, body)
            if form in (
                "llama",
                "hermes",
                "deepseek",
            ):  # thoughts end with a token, calls begin with text
                assert response.status_code == 400 and "no mark of its own" in response.text
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

            right = written % '{"a": 7, "b": 5}'
            assert all(map(fits, ("", "I add.", right, f"I add.\n{right}", f"{right} Done.")))
            assert fits(f"{right} And: {right}") == (
                parallel or form != "mistral"
            )  # as text, its mark is free again
            assert fits(right.replace("add", "free")) and fits(
                (written % '{"x": [1]}').replace("add", "free")
            )
            assert not any(
                map(
                    fits,
                    (
                        written % '{"a": 8, "b": 5}',
                        written % '{"a": 7}',
                        right.replace("add", "other"),
                    ),
                )
            )

    asyncio.run(main())


@pytest.mark.parametrize("end", ["</think>", "</thought>"])
def test_a_required_call_comes_after_the_thought_that_the_prompt_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, end: str
) -> None:
    monkeypatch.setattr(chat, "CLOSE", end)  # a special token, or text
    grammars = list[str]()
    compiled = Grammars.compile
    monkeypatch.setattr(
        Grammars,
        "compile",
        lambda self, asked: grammars.append(asked.text) or compiled(self, asked),
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
            matcher = compiled(library, Structure("lark", grammars[0], "tools")).matcher()
            call = '{"name": "add", "arguments": {"a": 7, "b": 5}}'
            text = f"7 and 5{end}\n\n<tool_call>\n{call}\n</tool_call>"
            tokens = MarkedTokenizer().ids(text)
            assert matcher.fits(tokens) == len(tokens)
            unfinished = MarkedTokenizer().ids("7 and 5")
            assert matcher.fits([*unfinished, *ByteTokenizer.eos_ids]) == len(unfinished)
            refused = await http.post(
                PATH, {"messages": ASKED, "response_format": {"type": "json_object"}}
            )
            assert refused.status_code == 400 and "inside of a thought" in refused.text

    asyncio.run(main())
