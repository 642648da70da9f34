"""Requests for more tokens than context and page pool leave, on every door."""

import asyncio
from pathlib import Path

import httpx
import pytest
from grpc import aio

from jaxserve.server.core.client_rules import ClientRules
from jaxserve.v1 import common_pb2, inference_pb2
from tests.jaxserve.server.grpc.vllm_harness import IDS, answered, refused, request
from tests.jaxserve.server.grpc.vllm_harness import serving as serving_vllm
from tests.jaxserve.server.harness import running
from tests.jaxserve.server.http.harness import Http, serving

STRICT = ClientRules(strict_max_tokens=True)

CONTEXT = 512
LARGE = 32_000


async def completion(http: Http, prompt: str, max_tokens: int) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": 1}
    return await http.post("/v1/completions", body)


@pytest.mark.parametrize("pages, room", [(512, CONTEXT), (32, 128)])
def test_they_get_what_is_left(tmp_path: Path, pages: int, room: int) -> None:
    """The page pool may be smaller than the context; a page has four tokens."""

    async def main() -> None:
        async with serving(tmp_path, num_pages=pages) as http:
            response = await completion(http, "hello", LARGE)
            reply = response.json()
            assert reply["choices"][0]["finish_reason"] == "length"
            assert reply["usage"]["total_tokens"] == room
            fitting = await completion(http, "hello", room - reply["usage"]["prompt_tokens"])
            assert fitting.json()["choices"][0]["text"] == reply["choices"][0]["text"]
            too_long = await completion(http, "x" * room, LARGE)
            assert too_long.status_code == 400
            assert "exceed the context" in too_long.text or "page pool" in too_long.text

            sampling = common_pb2.SamplingParams(max_tokens=LARGE, ignore_eos=True)
            asked = inference_pb2.GenerateRequest(text="hello", sampling=sampling)
            answer = await http.server.inference.Generate(asked)
            assert answer.usage.completion_tokens == reply["usage"]["completion_tokens"]
            await http.server.at_rest()

    asyncio.run(main())


def test_vllms_door(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving_vllm(tmp_path) as (server, engine):
            _, (complete,) = await answered(engine, request(max_tokens=LARGE, ignore_eos=True))
            assert complete.finish_reason == "length"
            assert complete.completion_tokens == CONTEXT - len(IDS)
            await server.at_rest()

    asyncio.run(main())


def test_they_are_refused_if_the_operator_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, rules=STRICT) as http:
            response = await completion(http, "hello", LARGE)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "max_tokens 32000 exceed the context of 512" in error["message"]
        async with running(tmp_path, rules=STRICT) as server:
            sampling = common_pb2.SamplingParams(max_tokens=LARGE)
            asked = inference_pb2.GenerateRequest(text="hello", sampling=sampling)
            with pytest.raises(aio.AioRpcError, match="exceed the context of 512"):
                await server.inference.Generate(asked)
        async with serving_vllm(tmp_path, rules=STRICT) as (_, engine):
            await refused(engine.Generate(request(max_tokens=LARGE)), "INVALID_ARGUMENT")

    asyncio.run(main())
