"""/v1/embeddings, as OpenAI's client and LangChain use it."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tiktoken
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI

from jaxserve.server.core.limits import Limits
from jaxserve.server.http.other_fields import IGNORED
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_model import naive_embedding
from tests.jaxserve.server.http.harness import TEXT, Http, serving

PATH = "/v1/embeddings"


def expected(prompt: str | list[int]) -> list[float]:
    return naive_embedding(
        tuple(ByteTokenizer().encode(prompt) if isinstance(prompt, str) else prompt)
    )


@pytest.mark.parametrize(
    "given", [TEXT, "🦊", [TEXT, "", TEXT + "es"], [5, 6, 7], [[5, 6, 7], [8]]]
)
@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_the_shape_of_an_answer(tmp_path: Path, given: Any, encoding: str | None) -> None:
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given

    async def main() -> None:
        async with serving(tmp_path, embeds=True) as http:
            response = await http.post(
                PATH, {"model": "fake", "input": given, "encoding_format": encoding}
            )
            assert response.status_code == 200 and response.headers["x-request-id"].startswith(
                "req-"
            )
            answer = response.json()
            assert answer.keys() == {"object", "data", "model", "usage"}
            assert (answer["object"], answer["model"]) == ("list", "fake")
            tokens = sum(int(expected(prompt)[1]) for prompt in prompts)
            assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
            for index, (entry, prompt) in enumerate(zip(answer["data"], prompts, strict=True)):
                assert entry.keys() == {"object", "index", "embedding"}
                assert (entry["object"], entry["index"]) == ("embedding", index)
                values = entry["embedding"]
                if encoding == "base64":
                    values = np.frombuffer(base64.b64decode(values), "<f4").tolist()
                assert values == expected(prompt)
            await http.server.at_rest()

    asyncio.run(main())


def test_openais_client(tmp_path: Path) -> None:
    """OpenAI's client asks for base64 by default."""

    async def main() -> None:
        async with serving(tmp_path, embeds=True) as http:
            create = http.client.embeddings.create
            for options in ({}, {"encoding_format": "float"}, {"dimensions": 2, "user": "me"}):
                reply = await create(model="fake", input=[TEXT, "b"], **options)  # type: ignore[call-overload]
                assert [entry.embedding for entry in reply.data] == [expected(TEXT), expected("b")]
                assert [entry.index for entry in reply.data] == [0, 1] and reply.object == "list"
                assert reply.usage.prompt_tokens == reply.usage.total_tokens == len(TEXT) + 1 + 2

            def ask() -> list[float]:
                with OpenAI(base_url=f"{http.base}/v1", api_key="none", timeout=60) as client:
                    return client.embeddings.create(model="fake", input=[5, 6]).data[0].embedding

            assert await asyncio.to_thread(ask) == expected([5, 6])
            with pytest.raises(
                openai.BadRequestError, match="embeddings of this model have 2, and are not cut"
            ) as bad:
                await create(model="fake", input=TEXT, dimensions=256)
            assert (bad.value.param, bad.value.code) == ("dimensions", "invalid_value")
            with pytest.raises(openai.BadRequestError) as long:
                await create(model="fake", input=["x", "x" * 600])
            assert (long.value.param, long.value.code) == ("input[1]", "context_length_exceeded")
            with pytest.raises(openai.NotFoundError):
                await create(model="text-embedding-3-small", input=TEXT)
            await http.server.at_rest()

    asyncio.run(main())


def test_what_embeds_completes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, embeds=True) as http:
            messages = [{"role": "user", "content": "hi"}]
            for path, body in (
                ("completions", {"prompt": "x"}),
                ("chat/completions", {"messages": messages}),
            ):
                for stream in (False, True):
                    response = await http.post(f"/v1/{path}", body | {"stream": stream})
                    error = response.json()["error"]
                    assert (response.status_code, error["code"]) == (400, "purpose")
                    assert error["message"].startswith(
                        "this model makes embeddings and generates no text"
                    )
            assert (await http.post("/tokenize", {"prompt": "x"})).json()["tokens"] == [256, 120]
            await http.server.at_rest()

    asyncio.run(main())


@asynccontextmanager
async def langchain(http: Http, **given: Any) -> AsyncIterator[OpenAIEmbeddings]:
    model = OpenAIEmbeddings(
        model="fake",
        base_url=f"{http.base}/v1",
        api_key="none",
        max_retries=0,
        timeout=60,
        **given,
    )  # type: ignore[arg-type]
    try:
        yield model
    finally:
        await model.async_client._client.close()
        model.client._client.close()


def test_langchain_with_texts(tmp_path: Path) -> None:
    """LangChain sends 1,000 texts in one request."""
    texts = [f"{i} {TEXT}" for i in range(1003)]

    async def main() -> None:
        async with serving(tmp_path, embeds=True, max_batch=16) as http:
            async with langchain(http, check_embedding_ctx_length=False) as model:
                assert await model.aembed_documents(texts) == [expected(text) for text in texts]
                assert await model.aembed_query(TEXT) == expected(TEXT)
                assert await asyncio.to_thread(model.embed_query, TEXT) == expected(TEXT)
            await http.server.at_rest()

    asyncio.run(main())


def test_langchain_with_token_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default LangChain sends token ids, which are taken as they are."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    of_bytes = tiktoken.Encoding(
        "bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={}
    )
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda name: of_bytes)

    async def main() -> None:
        async with serving(tmp_path, embeds=True) as http:
            async with langchain(http) as model:
                found = await model.aembed_documents([TEXT, "b"])
            assert found == [expected(list(TEXT.encode())), expected([98])]
            await http.server.at_rest()

    asyncio.run(main())


OUT_OF_BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": ["x"] * 2049}, "input"),
    ({"input": ["x", [1]]}, "input"),
    ({"input": [[1], [258]]}, "input[1]"),
    ({"input": [[]]}, "input"),
    ({"input": ["x", "\ud800"]}, "input"),
    ({"dimensions": 1}, "dimensions"),
    ({"dimensions": 0}, "dimensions"),
    ({"encoding_format": "int8"}, "encoding_format"),
    ({"priority": 101}, "priority"),
    ({"cache_salt": "s" * 129}, "cache_salt"),
    ({"request_id": "r" * 129}, "request_id"),
    ({"input": ["x", "y"], "request_id": "r" * 127}, "request_id"),  # -0, -1
    ({"stream": True}, "stream"),
    ({"tools": []}, "tools"),
]


def test_values_out_of_bounds(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, embeds=True) as http:
            canary = await http.canary()
            for given, param in OUT_OF_BOUNDS:
                content = json.dumps({"input": TEXT} | given).encode()
                response = await http.raw.post(
                    PATH, content=content, headers={"content-type": "application/json"}
                )
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, param), (given, error)
                assert await http.canary() == canary
            for name in IGNORED:
                assert (await http.post(PATH, {"input": TEXT, name: "anything"})).status_code == 200
            most = await http.post(PATH, {"input": ["x"] * 2048})
            assert [entry["index"] for entry in most.json()["data"]] == list(range(2048))
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize("ending", ["gone", "deadline", "age"])
def test_however_it_ends_everything_comes_back(tmp_path: Path, ending: str) -> None:
    limits = Limits(max_request_seconds=0.2) if ending == "age" else Limits()
    body = {"input": [f"{i}" + "x" * 200 for i in range(200)]}

    async def main() -> None:
        async with serving(
            tmp_path, embeds=True, limits=limits, seconds=0.01, step_tokens=16
        ) as http:
            if ending == "gone":
                with pytest.raises(httpx.ReadTimeout):
                    await http.post(PATH, body, timeout=httpx.Timeout(60, read=0.2))
            else:
                headers = {"x-request-timeout": "0.2"} if ending == "deadline" else {}
                response = await http.post(PATH, body, headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline")
            await http.server.at_rest()

    asyncio.run(main())
