"""/tokenize, /detokenize and /tokenizer_info, as vLLM's clients and lm-eval call them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jaxserve.server.http.tokenization import _added
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.server import harness
from tests.jaxserve.server.http.harness import serving

BOS = ByteTokenizer.bos_id
MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.mood }}{{ m['colour'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{{ '' if true else '<tool_call>' }}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "prompt": ({"prompt": "hé"}, [BOS, *"hé".encode()]),
    "no special tokens": ({"prompt": "hé", "add_special_tokens": False}, [*"hé".encode()]),
    "special tokens": ({"prompt": "h", "add_special_tokens": True}, [BOS, *b"h"]),
    "empty": ({"prompt": "", "add_special_tokens": False}, []),
    "messages": ({"messages": MESSAGES}, [*b"user: hi\nassistant: "]),
    "no opening": ({"messages": MESSAGES, "add_generation_prompt": False}, [*b"user: hi\n"]),
    "vllm's defaults": (
        {"messages": MESSAGES, "add_special_tokens": False, "add_generation_prompt": True},
        [*b"user: hi\nassistant: "],
    ),
    "tools": ({"messages": MESSAGES, "tools": [TOOL]}, [*b"<look>user: hi\nassistant: "]),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tools beside a prompt": ({"prompt": "x", "tools": [TOOL]}, "tools"),
    "special tokens around a template": (
        {"messages": MESSAGES, "add_special_tokens": True},
        "add_special_tokens",
    ),
    "a tool of another type": ({"messages": MESSAGES, "tools": [{"type": "x"}]}, "tools[0].type"),
    "a word": ({"prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
}


@pytest.fixture(autouse=True)
def template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "TEMPLATE", TEMPLATE)


def test_tokenize(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            for name, (body, ids) in CASES.items():
                reply = await http.post("/tokenize", body)
                assert reply.status_code == 200, (name, reply.text)
                expected = {"tokens": ids, "count": len(ids), "max_model_len": 512}
                assert reply.json() == expected, name
            for name, (body, field) in REFUSED.items():
                reply = await http.post("/tokenize", body)
                assert reply.status_code == 400, name
                assert reply.json()["error"]["param"] == field, name

    asyncio.run(main())


def test_the_text_of_each_token(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            body = {"prompt": "hé", "return_token_strs": True}
            reply = (await http.post("/tokenize", body)).json()
            assert reply["token_strs"] == ["<bos>", "h", "<0xC3>", "<0xA9>"]

    asyncio.run(main())


def test_bos_that_is_eos_too_is_put_before_a_text_only() -> None:
    class OneToken(ByteTokenizer):
        eos_ids = (BOS,)

    assert _added(OneToken()) == {"add_bos_token": True, "add_eos_token": False}


def test_there_and_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            ids = (await http.post("/tokenize", {"prompt": "hello"})).json()["tokens"]
            assert (await http.post("/detokenize", {"tokens": ids})).json() == {"prompt": "hello"}

    asyncio.run(main())


def test_what_lm_eval_asks_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            assert (await http.raw.get("/tokenizer_info")).json() == {
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "unk_token": None,
                "pad_token": None,
                "chat_template": TEMPLATE,
                "add_bos_token": True,
                "add_eos_token": False,
                "vocab_size": 258,
                "model_max_length": 512,
            }

    asyncio.run(main())


def test_without_a_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "TEMPLATE", "")

    async def main() -> None:
        async with serving(tmp_path) as http:
            info = (await http.raw.get("/tokenizer_info")).json()
            assert info["chat_template"] is None and info["eos_token"] == "<eos>"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ({}, None),
        ({"mood": "!"}, None),
        ({"colour": "red"}, None),
        ({"weight": 3, "tone": {"id": "a"}}, "weight, tone"),
        ({"mood": "!", "weight": 3}, "weight"),
        ({"weight": None}, None),
        ({"annotations": [], "refusal": None}, None),
        ({"annotations": [], "refusal": "no"}, "refusal"),
        ({"function_call": {"name": "add", "arguments": "{}"}}, "function_call"),
        ({"audio": {"id": "a"}}, "audio"),
        ({"ключ": 1, "weight": 2}, "weight, ..."),
        ({"a\r\nset-cookie: a=b": 1}, "..."),
        ({"a, b": 1}, "..."),
        ({f"k{n}": n for n in range(100)}, ", ".join(f"k{n}" for n in range(16)) + ", ..."),
        ({"name": "me"}, None),
    ],
)
def test_keys_of_messages_that_the_template_does_not_read_are_named(
    tmp_path: Path, given: dict[str, Any], ignored: str | None
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            message = {"role": "user", "content": "hi"} | given
            for stream in (False, True):
                body = {"messages": [message], "max_tokens": 1, "stream": stream}
                reply = await http.post("/v1/chat/completions", body)
                assert reply.status_code == 200
                assert reply.headers.get("jaxserve-ignored") == ignored

    asyncio.run(main())


def test_a_template_that_uses_whole_messages_reads_every_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "TEMPLATE", "{{ messages | tojson }}")

    async def main() -> None:
        async with serving(tmp_path) as http:
            message = {"role": "user", "content": "hi", "weight": 3}
            body = {"messages": [message], "max_tokens": 1}
            reply = await http.post("/v1/chat/completions", body)
            assert reply.status_code == 200
            assert "jaxserve-ignored" not in reply.headers

    asyncio.run(main())
