"""/v1/chat/completions, as OpenAI's client and LangChain use it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI

from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.server.http.harness import expected, serving

pytestmark = pytest.mark.system
PATH = "/v1/chat/completions"
RENDERED = "system: be brief\nuser: hi\n"
MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
]


def answer(n: int = 8, index: int = 0) -> str:
    return expected(tuple(RENDERED.encode()), n, index)


def test_whole(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            reply = await http.client.chat.completions.create(
                model="fake", messages=MESSAGES, max_completion_tokens=8, seed=1, n=2
            )
            assert [choice.message.content for choice in reply.choices] == [
                answer(index=k) for k in range(2)
            ]
            assert {(c.message.role, c.finish_reason) for c in reply.choices} == {
                ("assistant", "length")
            }
            assert reply.id == f"chatcmpl-{reply._request_id}" and reply.object == "chat.completion"
            assert reply.usage and reply.usage.prompt_tokens == len(RENDERED)
            assert reply.usage.completion_tokens == 16
            unbounded = {
                "model": None,
                "messages": MESSAGES,
                "seed": 1,
                "ignore_eos": True,
                "top_k": 0,
            }
            usage = (await http.post(PATH, unbounded)).json()["usage"]
            assert usage["total_tokens"] == 512
            await http.server.at_rest()

    asyncio.run(main())


def test_other_parts_that_are_text(tmp_path: Path) -> None:
    parts = [
        {"type": "input_text", "text": "h"},
        {"type": "refusal", "refusal": "i", "cache_control": {"type": "ephemeral"}},
    ]

    async def main() -> None:
        async with serving(tmp_path) as http:
            messages = [MESSAGES[0], {"role": "user", "content": parts}]
            asked = {"messages": messages, "seed": 1, "max_tokens": 8}
            reply = (await http.post(PATH, asked)).json()
            assert reply["choices"][0]["message"]["content"] == answer()

    asyncio.run(main())


def test_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            stream = await http.client.chat.completions.create(
                model="fake",
                messages=MESSAGES,
                max_tokens=9,
                seed=1,
                n=2,
                stream=True,
                stream_options={"include_usage": True},
            )
            *chunks, last = [chunk async for chunk in stream]
            assert last.choices == [] and last.usage and last.usage.completion_tokens == 18
            assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
            assert {chunk.id for chunk in chunks} == {last.id} and all(
                chunk.usage is None for chunk in chunks
            )
            for index in range(2):
                own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
                assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
                assert [c.delta.role for c in own[1:]] == [None] * (len(own) - 1)
                assert "".join(choice.delta.content or "" for choice in own) == answer(9, index)
                assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["length"]
            await http.server.at_rest()

    asyncio.run(main())


def test_events(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            body = {"messages": MESSAGES, "max_tokens": 4, "seed": 1, "stop": answer(4)[2]}
            first, *_, last, done = await http.events(PATH, body)
            assert first["choices"] == [
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ]
            assert (
                last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
            )
            assert last["choices"][0]["stop_reason"] == answer(4)[2]
            assert done == "[DONE]" and "usage" not in last

    asyncio.run(main())


@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs(tmp_path: Path, top: int | None) -> None:
    async def main() -> None:
        async with serving(tmp_path, tops=True) as http:
            body = {
                "messages": MESSAGES,
                "max_tokens": 6,
                "seed": 1,
                "logprobs": True,
                "top_logprobs": top,
            }
            (choice,) = (await http.post(PATH, body)).json()["choices"]
            content = choice["logprobs"]["content"]
            assert "".join(entry["token"] for entry in content) == answer(6)
            for i, entry in enumerate(content):
                assert entry["bytes"] == [ord(answer(6)[i])]
                assert entry["logprob"] == -float(len(RENDERED) - 1 + i)
                assert len(entry["top_logprobs"]) == (top or 0)
                if top:
                    assert entry["top_logprobs"][0] == {
                        k: entry[k] for k in ("token", "logprob", "bytes")
                    }
            *chunks, _ = await http.events(PATH, body)
            scored = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            assert [entry for scores in scored if scores for entry in scores["content"]] == content

    asyncio.run(main())


BAD: list[tuple[object, str, str]] = [
    ([], "messages", "invalid_value"),
    ("hi", "messages", "invalid_value"),
    (["hi"], "messages[0]", "invalid_value"),
    ([{"role": "user"}], "messages[0].content", "invalid_value"),
    ([{"role": 5, "content": "x"}], "messages[0].role", "invalid_value"),
    ([{"role": "user", "content": None}], "messages[0].content", "invalid_value"),
    ([{"role": "user", "content": 5}], "messages[0].content", "invalid_value"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name", "invalid_value"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "invalid_value"),
    (
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages[0].content[0].text",
        "invalid_value",
    ),
    (
        [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}],
        "messages[0].content[0].refusal",
        "invalid_value",
    ),
    (
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "x", "bold": True}]}],
        "messages[0].content[0].bold",
        "unknown_parameter",
    ),
    (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}],
            }
        ],
        "messages[0].content[1].type",
        "unsupported_parameter",
    ),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content", "invalid_value"),
]


def test_bad_messages(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            canary = await http.canary()
            for messages, param, code in BAD:
                for path in (PATH, "/tokenize"):
                    # as ASCII: JSON can write half a surrogate pair, UTF-8 cannot
                    content = json.dumps({"messages": messages}).encode()
                    response = await http.raw.post(
                        path, content=content, headers={"content-type": "application/json"}
                    )
                    error = response.json()["error"]
                    assert (response.status_code, error["param"], error["code"]) == (
                        400,
                        param,
                        code,
                    ), error
                    assert await http.canary() == canary
            await http.server.at_rest()

    asyncio.run(main())


def test_null_fields_of_messages_are_left_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            messages = [
                {
                    "role": "assistant",
                    "content": "x",
                    "refusal": None,
                    "tool_calls": None,
                    "audio": None,
                }
            ]
            reply = await http.post("/tokenize", {"messages": messages})
            assert reply.json()["tokens"] == list(b"assistant: x\n")

    asyncio.run(main())


def test_langchain(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            model = ChatOpenAI(
                model="fake",
                base_url=f"{http.base}/v1",
                api_key="none",  # type: ignore[arg-type]
                max_completion_tokens=8,
                seed=1,
                max_retries=0,
                timeout=60,
                http_async_client=http.raw,
            )
            messages = [("system", "be brief"), ("user", "hi")]
            reply = await model.ainvoke(messages)
            assert reply.content == answer()
            assert (
                reply.usage_metadata and reply.usage_metadata["total_tokens"] == len(RENDERED) + 8
            )
            pieces = [str(piece.content) async for piece in model.astream(messages)]
            assert "".join(pieces) == answer() and len(pieces) > 2
            await http.server.at_rest()

    asyncio.run(main())


def test_the_fake_answers_are_text() -> None:
    """Without this, comparisons of offsets and bytes in other tests would show nothing."""
    assert answer(9).isascii() and ByteTokenizer().decode(answer(9).encode()) == answer(9)
