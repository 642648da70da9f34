"""/v1/completions, as OpenAI's client and evaluation harnesses use it."""

import asyncio
from pathlib import Path

import pytest
from openai import OpenAI

from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.engine.host.driver import EagerProposer
from tests.jaxserve.server.http.harness import TEXT, Http, expected, serving

PATH = "/v1/completions"
tokenizer = ByteTokenizer()


def test_whole(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            reply = await http.client.completions.create(
                model="fake", prompt=TEXT, max_tokens=8, seed=1
            )
            (choice,) = reply.choices
            assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (
                expected(),
                0,
                "length",
                None,
            )
            assert reply.object == "text_completion" and reply.model == "fake"
            assert reply.id == f"cmpl-{reply._request_id}" and reply.id.startswith("cmpl-req-")
            assert reply.usage and reply.usage.prompt_tokens == len(TEXT) + 1
            assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (8, len(TEXT) + 9)
            default = await http.client.completions.create(model="fake", prompt=TEXT, seed=1)
            assert default.choices[0].text == expected(n=16)
            assert default.usage and default.usage.prompt_tokens_details
            assert 0 < (default.usage.prompt_tokens_details.cached_tokens or 0) <= len(TEXT)
            await http.server.at_rest()

    asyncio.run(main())


def test_usage_tells_of_drafts(tmp_path: Path) -> None:
    """Usage has OpenAI's prediction fields; the text is that of a server without drafts."""

    async def main() -> None:
        async with serving(tmp_path, proposer=EagerProposer()) as http:
            asked = {"model": "fake", "prompt": TEXT, "max_tokens": 24, "seed": 1}
            whole = await http.client.completions.create(**asked)
            last = {"include_usage": True}
            stream = await http.client.completions.create(**asked, stream=True, stream_options=last)
            usages = [chunk.usage async for chunk in stream]
            assert whole.choices[0].text == expected(n=24)
            for usage in (whole.usage, usages[-1]):
                assert usage and usage.completion_tokens_details
                told = usage.completion_tokens_details
                assert (
                    0
                    < (told.rejected_prediction_tokens or 0)
                    < 24
                    > (told.accepted_prediction_tokens or 0)
                    > 0
                )
            await http.server.at_rest()

    asyncio.run(main())


def test_synchronous_client(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:

            def ask() -> str:
                with OpenAI(base_url=f"{http.base}/v1", api_key="none", timeout=60) as client:
                    stream = client.completions.create(
                        model="fake", prompt=TEXT, max_tokens=8, seed=1, stream=True
                    )
                    return "".join(chunk.choices[0].text for chunk in stream)

            assert await asyncio.to_thread(ask) == expected()

    asyncio.run(main())


@pytest.mark.parametrize("prompts", [[TEXT, "b", TEXT], [[5, 6, 7], [8]]])
def test_several_prompts(tmp_path: Path, prompts: list[str] | list[list[int]]) -> None:
    wanted = [expected(prompt, 6, k) for prompt in prompts for k in range(2)]

    async def main() -> None:
        async with serving(tmp_path) as http:
            body = {"prompt": prompts, "n": 2, "max_tokens": 6, "seed": 1, "request_id": "mine"}
            whole = (await http.post(PATH, body)).json()
            assert [choice["index"] for choice in whole["choices"]] == list(range(len(wanted)))
            assert [choice["text"] for choice in whole["choices"]] == wanted
            assert whole["id"] == "cmpl-mine"
            prompt_tokens = sum(len(p) + isinstance(p, str) for p in prompts)
            assert whole["usage"]["prompt_tokens"] == prompt_tokens
            assert whole["usage"]["completion_tokens"] == 6 * len(wanted)
            options = {"stream_options": {"include_usage": True}}
            *chunks, usage, done = await http.events(PATH, body | options)
            assert done == "[DONE]" and usage["choices"] == []
            assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
            assert usage["usage"]["total_tokens"] == prompt_tokens + 6 * len(wanted)
            assert usage["usage"]["prompt_tokens"] == prompt_tokens
            for index, text in enumerate(wanted):
                own = [
                    chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index
                ]
                assert "".join(choice["text"] for choice in own) == text
                assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
            await http.server.at_rest()

    asyncio.run(main())


def test_token_ids(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            ids = tokenizer.encode(TEXT)
            reply = await http.client.completions.create(
                model="fake", prompt=ids, max_tokens=8, seed=1
            )
            assert reply.choices[0].text == expected()

    asyncio.run(main())


def test_stops(tmp_path: Path) -> None:
    text = expected(n=20)

    async def main() -> None:
        async with serving(tmp_path) as http:
            for stop in (text[7:10], ["never", text[7:10]]):
                reply = await http.post(
                    PATH, {"prompt": TEXT, "max_tokens": 20, "seed": 1, "stop": stop}
                )
                (choice,) = reply.json()["choices"]
                assert (choice["text"], choice["finish_reason"]) == (text[:7], "stop")
                assert choice["stop_reason"] == text[7:10]
            extra = {
                "include_stop_str_in_output": True,
                "stop": text[7:10],
                "ignore_eos": True,
                "top_k": -1,
            }
            reply = await http.client.completions.create(
                model="fake", prompt=TEXT, max_tokens=20, seed=1, extra_body=extra
            )
            assert reply.choices[0].text == text[:10]
            by_id = {"prompt": TEXT, "max_tokens": 20, "seed": 1, "stop_token_ids": [ord(text[4])]}
            (choice,) = (await http.post(PATH, by_id)).json()["choices"]
            assert choice["stop_reason"] == ord(text[4]) and choice["finish_reason"] == "stop"
            biased = {
                "prompt": TEXT,
                "max_tokens": 4,
                "seed": 1,
                "allowed_token_ids": [257],
                "logit_bias": {"257": 5},
            }
            (choice,) = (await http.post(PATH, biased)).json()["choices"]
            assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == (
                "stop",
                None,
                "",
            )
            await http.server.at_rest()

    asyncio.run(main())


def test_logprobs(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tops=True) as http:
            reply = await http.client.completions.create(
                model="fake", prompt=TEXT, max_tokens=8, seed=1, logprobs=2
            )
            scores = reply.choices[0].logprobs
            assert scores and scores.tokens and scores.token_logprobs and scores.top_logprobs
            assert scores.tokens == [tokenizer.token_text(ord(c)) for c in expected()]
            assert scores.token_logprobs == [-float(len(TEXT) + i) for i in range(8)]
            assert scores.text_offset == list(range(8))
            for token, logprob, top in zip(
                scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True
            ):
                assert len(top) == 2 and max(top.values()) == top[token] == logprob
            none = await http.client.completions.create(
                model="fake", prompt=TEXT, max_tokens=8, seed=1, logprobs=0
            )
            assert none.choices[0].logprobs and none.choices[0].logprobs.top_logprobs
            assert [list(top) for top in none.choices[0].logprobs.top_logprobs] == [
                [t] for t in scores.tokens
            ]

    asyncio.run(main())


async def _scored(http: Http, **given: object) -> list[dict]:
    """Ask for the log-probabilities of a text, as evaluation harnesses do."""
    body = {
        "prompt": [tokenizer.encode(TEXT), [70]],
        "temperature": 0,
        "logprobs": 1,
        "seed": 1,
        "echo": True,
    }
    reply = (await http.post(PATH, body | given)).json()
    assert reply["usage"]["completion_tokens"] == 2 * int(str(given["max_tokens"]))
    return reply["choices"]


def test_echo_scores_the_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tops=True) as http:
            for max_tokens in (0, 1):
                first, second = await _scored(http, max_tokens=max_tokens)
                scores = first["logprobs"]
                assert first["text"] == TEXT + expected(n=1) * max_tokens
                assert first["finish_reason"] == "length"
                assert scores["tokens"] == ["<bos>", *TEXT, *expected(n=1) * max_tokens]
                assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
                assert scores["token_logprobs"][1:] == [
                    -float(p) for p in range(len(TEXT) + max_tokens)
                ]
                assert scores["text_offset"] == [0, *range(len(TEXT) + max_tokens)]
                chosen = scores["token_logprobs"][1:]
                assert [max(top.values()) for top in scores["top_logprobs"][1:]] == chosen
                assert (
                    second["logprobs"]["tokens"][0] == "F"
                    and len(second["logprobs"]["tokens"]) == 1 + max_tokens
                )
            await http.server.at_rest()

    asyncio.run(main())


def test_echo_in_a_stream_is_the_whole_in_pieces(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tops=True) as http:
            text = "é" + TEXT * 5
            body = {
                "prompt": [text, "x"],
                "max_tokens": 20,
                "seed": 1,
                "logprobs": 2,
                "echo": True,
                "n": 2,
            }
            whole = (await http.post(PATH, body)).json()["choices"]
            *chunks, done = await http.events(PATH, body)
            assert done == "[DONE]"
            for index, choice in enumerate(whole):
                own = [
                    chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index
                ]
                assert "".join(piece["text"] for piece in own) == choice["text"]
                for name, values in choice["logprobs"].items():
                    assert [
                        v for piece in own if piece["logprobs"] for v in piece["logprobs"][name]
                    ] == values
                assert choice["text"].startswith([text, "x"][index // 2])
                starts = choice["logprobs"]["text_offset"]
                assert all(
                    choice["text"][start] == token
                    for start, token in zip(starts, choice["logprobs"]["tokens"], strict=True)
                    if len(token) == 1
                )
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.system
def test_prompt_logprobs(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tops=True) as http:
            body = {"prompt": TEXT, "max_tokens": 2, "seed": 1, "prompt_logprobs": 1}
            (choice,) = (await http.post(PATH, body)).json()["choices"]
            first, second, *rest = choice["prompt_logprobs"]
            assert first is None and len(rest) == len(TEXT) - 1
            assert second == {str(ord("T")): {"logprob": 0.0, "rank": 1, "decoded_token": "T"}}
            assert choice["logprobs"] is None
            chat = {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 2,
                "prompt_logprobs": 0,
            }
            reply = (await http.post("/v1/chat/completions", chat)).json()
            assert len(reply["prompt_logprobs"]) == len("user: hi\n")

    asyncio.run(main())


def test_usage_of_every_chunk(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            options = {"include_usage": True, "continuous_usage_stats": True}
            body = {"prompt": TEXT, "max_tokens": 9, "seed": 1, "stream_options": options}
            *chunks, total, done = await http.events(PATH, body)
            made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert done == "[DONE]" and made == sorted(made) and made[-1] == 9
            assert total["usage"] == chunks[-1]["usage"]

    asyncio.run(main())
