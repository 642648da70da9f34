"""Whatever an answer holds, a later request may hold in its history: over HTTP and over gRPC.

Origins: ggml-org/llama.cpp#25510 and local-inference-lab/vllm#684, arguments of calls that a server
wrote and from the next turn on refuses.
"""

import asyncio
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from jaxserve.chat import Chat
from jaxserve.chat.answers.formats import TOOL_FORMATS
from jaxserve.chat.answers.parser import Reading
from jaxserve.chat.bounds import MAX_DIGITS, MAX_TEXT_DEPTH
from jaxserve.client import AsyncClient, ToolCall
from jaxserve.tokenizer import MARK
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.server.http.scripted_model import (
    ASKED,
    FORMS,
    PATH,
    TURNS,
    Says,
    speaking,
    with_each_form,
)
from tests.slow_cases import slow_but

pytestmark = pytest.mark.system
# The format of calls is told by the mark, and the arguments are objects or texts in the template.
TEXTS = TURNS.replace("call.function.arguments | tojson", "'' + call.function.arguments")
LARGE = {"max_context": 8192, "num_pages": 2048, "step_tokens": 2048}
WRAPPED = 2  # levels around the arguments of a call: an array of objects
SCALARS = (
    *("25000000000000000000000", "-" + "9" * MAX_DIGITS, "9007199254740993", "0", "-0"),
    *("1e999", "-1E-400", "0.1000000000000000055511151231257827", "true", "null", '""'),
    *(r'"\ud83d"', r'"\ude00\ud83d"', r'"\ud83d\ude00"', r'"\u0000"', r'"\ufdd0"', r'"\\"'),
    *(f'"{MARK}"', '"<s>"', '"\N{LATIN SMALL LETTER E}\N{COMBINING ACUTE ACCENT}"', '"\u2028"'),
)
BEFORE = ("", "I add.\n", f"<think>\n5{MARK}?</think>\n", MARK)
# None of the arguments is a text, which models of some forms write without quotes.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array"}, "c": {"type": "number"}},
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
TOO_MUCH = (
    "9" * (MAX_DIGITS + 1),
    "[" * MAX_TEXT_DEPTH + "]" * MAX_TEXT_DEPTH,
)


def arguments(chance: random.Random) -> str:
    """Return the JSON text of an object, as deep and as odd as a call may have it."""

    def value(levels: int) -> str:
        kind = chance.choice("scalar list object".split()) if levels else "scalar"
        if kind == "scalar":
            return chance.choice(SCALARS)
        inner = [value(levels - 1) for _ in range(chance.randint(0, 3))]
        if kind == "list":
            return "[" + ", ".join(inner) + "]"
        keys = [chance.choice(('"a"', '"b"', '""', r'"\ud83d"', '"</tool>"')) for _ in inner]
        return "{" + ",".join(f"{key}: {each}" for key, each in zip(keys, inner, strict=True)) + "}"

    deep = MAX_TEXT_DEPTH - WRAPPED - 1
    nested = "[" * deep + chance.choice(SCALARS) + "]" * deep
    last = nested if chance.random() < 0.2 else value(5)
    return f'{{"a": {chance.choice(SCALARS)}, "c": {last}}}'


async def by_http(http: Any, messages: list[Any], whole: bool) -> dict[str, Any]:
    """Return the message of an answer as OpenAI's own client gives it back."""
    create = http.client.chat.completions
    asked = {"model": "fake", "messages": messages, "tools": [TOOL]}
    if whole:
        return (await create.create(**asked)).choices[0].message.model_dump()
    async with create.stream(**asked) as stream:
        return (
            (await stream.get_final_completion())
            .choices[0]
            .message.model_dump(
                exclude={
                    "parsed": True,
                    "tool_calls": {"__all__": {"function": {"parsed_arguments"}}},
                }
            )
        )


async def by_grpc(client: AsyncClient, messages: list[Any]) -> dict[str, Any]:
    """Return the message of an answer as a caller of our client gives it back."""
    (choice,) = (await client.chat(messages, tools=[TOOL["function"]])).choices
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.tool_calls:
        message["tool_calls"] = choice.tool_calls
    if choice.reasoning_content:
        message["reasoning_content"] = choice.reasoning_content
    return message


def called(message: dict[str, Any]) -> tuple[str, str]:
    """Return id and arguments of the only call of a message."""
    (call,) = message["tool_calls"]
    if isinstance(call, ToolCall):
        return call.id, call.arguments
    return call["id"], call["function"]["arguments"]


@pytest.mark.parametrize(("form", "turns"), with_each_form([TURNS, TEXTS], ["objects", "texts"]))
def test_every_call_can_be_rendered_again(tmp_path: Path, form: str, turns: str) -> None:
    _, call, _ = FORMS[form]
    chance = random.Random(f"{form} {turns}")
    reading = Reading(TOOL_FORMATS[form], {"add": SCHEMA}, thinks=True)
    (tmp_path / "chat_template.jinja").write_text(turns, encoding="utf-8")
    with closing(Chat(tmp_path, ByteTokenizer())) as chat:
        for _ in range(60):
            written = arguments(chance)
            answer = reading.read(chance.choice(BEFORE) + call(written))
            ((made, text),) = answer.calls
            assert text == written
            message = {
                "role": "assistant",
                "content": answer.content or None,
                "reasoning_content": answer.reasoning,
                "tool_calls": [{"id": made.id, "function": {"name": made.name, "arguments": text}}],
            }
            assert "CALL" in chat.render([*ASKED, message]).text


# Ids of another form, ids in the text, arguments without quotes.
@pytest.mark.parametrize("form", slow_but(list(FORMS), ["mistral", "kimi_k2", "qwen3_coder"]))
def test_every_door_takes_back_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str
) -> None:
    mark, call, _ = FORMS[form]
    odd = '{"a": [25000000000000000000000, "\\ud83d", "MARK"], "c": 1e999}'.replace("MARK", MARK)

    async def main() -> None:
        async with (
            speaking(tmp_path, monkeypatch, f"</think>{mark}", **LARGE) as http,
            AsyncClient(http.server.address) as client,
        ):
            for before in BEFORE:
                says(before + call(odd))
                for door in range(3):
                    asked = list(ASKED)
                    for _ in range(2):  # the second answer stands on the first
                        if door == 2:
                            message = await by_grpc(client, asked)
                        else:
                            message = await by_http(http, asked, whole=door == 0)
                        id, made = called(message)
                        assert made == odd
                        asked += [message, {"role": "tool", "tool_call_id": id, "content": "12"}]
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize(("form", "value"), with_each_form(TOO_MUCH, ["digits", "levels"]))
def test_beyond_the_bounds_a_call_is_content(tmp_path: Path, form: str, value: str) -> None:
    _, call, _ = FORMS[form]
    answer = Reading(TOOL_FORMATS[form], {"add": SCHEMA}).read(call(f'{{"a": {value}}}'))
    assert not answer.calls and value in answer.content
    (tmp_path / "chat_template.jinja").write_text(TURNS, encoding="utf-8")
    with closing(Chat(tmp_path, ByteTokenizer())) as chat:
        said = {"role": "assistant", "content": answer.content}
        assert value in chat.render([*ASKED, said]).text


@pytest.mark.parametrize("text", ["", " ", MARK, f"a{MARK}b", "\0", "<s>", "</think>"])
def test_texts_without_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, text: str
) -> None:
    async def main() -> None:
        async with (
            speaking(tmp_path, monkeypatch, "</think><tool_call>", **LARGE) as http,
            AsyncClient(http.server.address) as client,
        ):
            for before in ("", "<think>", "<think>thought</think>"):
                says(before + text)
                asked: list[Any] = list(ASKED)
                for whole in (True, False):
                    asked += [await by_http(http, asked, whole), *ASKED]
                asked = list(ASKED)
                for _ in range(2):
                    asked += [await by_grpc(client, asked), *ASKED]

    asyncio.run(main())


def test_clients_may_not_write_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "<tool_call>") as http:
            says("12")
            asked = [{"role": "user", "content": f"a{MARK}b"}]
            response = await http.post(PATH, {"messages": asked})
            assert response.status_code == 400 and "U+FDD0" in response.text
            answered = [*ASKED, {"role": "assistant", "content": f"a{MARK}b"}, *ASKED]
            assert (await http.post(PATH, {"messages": answered})).status_code == 200
            rendered = http.server.service.prompts.chat.render(answered)
            assert "a\N{REPLACEMENT CHARACTER}b" in rendered.text

    asyncio.run(main())
