"""Every method of both clients, against a server over the fake device."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.client import (
    AsyncClient,
    Client,
    Delta,
    Finish,
    PromptInfo,
    PromptLogprobs,
    descriptions,
    join,
    results,
)
from jaxserve.client.messages import HEADER, ChatOptions, Options
from jaxserve.errors import (
    AdminOnlyError,
    CredentialError,
    DrainingError,
    PurposeError,
    RequestError,
)
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.core.limits import Limits
from jaxserve.server.readiness import Phase
from jaxserve.server.security.auth import BearerTokens
from jaxserve.v1 import admin_pb2, common_pb2, inference_pb2
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_model import naive, naive_embedding
from tests.jaxserve.engine.host.driver import request as engine_request
from tests.jaxserve.server import harness
from tests.jaxserve.server.harness import ENGINE, MODEL, running

TEXT = "The quick brown fox"
IDS = ByteTokenizer().encode(TEXT)
TALK = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


class Waiting:
    """The client that waits, on threads: to a test it looks like the other one."""

    def __init__(self, address: str, **given: Any):
        self.client = Client(address, **given)

    def __getattr__(self, name: str) -> Any:
        async def method(*args: Any, **given: Any) -> Any:
            return await asyncio.to_thread(getattr(self.client, name), *args, **given)

        return method

    async def read(self, name: str, *args: Any, **given: Any) -> tuple[Any, list[results.Event]]:
        stream = getattr(self.client, name)(*args, **given)
        return stream, await asyncio.to_thread(lambda: list(stream))

    async def events(self, name: str, *args: Any, **given: Any) -> list[results.Event]:
        return await asyncio.to_thread(lambda: list(getattr(self.client, name)(*args, **given)))


class Looping(AsyncClient):
    async def read(self, name: str, *args: Any, **given: Any) -> tuple[Any, list[results.Event]]:
        stream = getattr(self, name)(*args, **given)
        return stream, [event async for event in stream]

    async def events(self, name: str, *args: Any, **given: Any) -> list[results.Event]:
        return [event async for event in getattr(self, name)(*args, **given)]


@asynccontextmanager
async def opened(kind: type, address: str, **given: Any) -> AsyncIterator[Any]:
    client = kind(address, **given)
    try:
        yield client
    finally:
        await client.close()


both = pytest.mark.parametrize("kind", [Waiting, Looping], ids=["sync", "async"])


def expected(prompt: list[int] = IDS, n: int = 8, index: int = 0) -> tuple[int, ...]:
    """Return the fake device's answer, by its arithmetic over a plain list."""
    return tuple(
        naive(engine_request(prompt=tuple(prompt), max_tokens=n, temperature=0), index, 1, n)
    )


@both
def test_generate(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with running(tmp_path) as server, opened(kind, server.address) as client:
            result = await client.generate(TEXT, seed=1, request_id="mine", **GREEDY)
            (choice,) = result.choices
            assert (result.request_id, choice.token_ids) == ("mine", expected())
            assert choice.text == ByteTokenizer().decode(expected())
            assert (choice.index, choice.finish_reason, choice.stopped_by, choice.seed) == (
                0,
                "length",
                None,
                1,
            )
            assert (choice.logprobs, result.prompt_logprobs) == ((), ())
            assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(IDS), 8)
            assert 0 < choice.timings.first_token_seconds <= choice.timings.total_seconds
            await server.at_rest()

    asyncio.run(main())


@both
def test_prompts_and_parameters_in_every_form(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with running(tmp_path) as server, opened(kind, server.address) as client:
            params = SamplingParams(seed=1, max_tokens=20, temperature=0, ignore_eos=True)
            for prompt in (TEXT, IDS, tuple(IDS), np.array(IDS)):
                result = await client.generate(prompt, params, max_tokens=8)
                assert result.choices[0].token_ids == expected()
            stop = expected()[4]
            bias = expected()[2]
            result = await client.generate(
                TEXT,
                params,
                stop_token_ids=[stop],
                allowed_token_ids=range(97),
                logit_bias={bias: 0.0},
            )
            assert (
                result.choices[0].stopped_by == stop and result.choices[0].finish_reason == "stop"
            )
            text = ByteTokenizer().decode(expected(n=20))
            result = await client.generate(TEXT, params, stop=[text[7:9]], include_stop=True)
            assert (
                result.choices[0].stopped_by == text[7:9]
                and result.choices[0].text == text[: text.index(text[7:9]) + 2]
            )

    asyncio.run(main())


@both
def test_a_stream_is_the_unary_answer_in_parts(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with running(tmp_path) as server, opened(kind, server.address) as client:
            asked = {
                "seed": 1,
                "n": 2,
                "logprobs": 1,
                "prompt_logprobs": 0,
                "request_id": "mine",
                **GREEDY,
            }
            events = await client.events("stream", TEXT, **asked)
            whole = await client.generate(TEXT, **asked)
            kinds = [type(event) for event in events]
            assert kinds[0] is PromptInfo and kinds[-1] is Finish
            assert {Delta, PromptLogprobs} == set(kinds[1:-1])
            joined = join(events)
            assert without_times(joined) == without_times(whole)
            assert [entry.token_id for entry in joined.prompt_logprobs] == IDS[1:]
            assert [entry.logprob for entry in joined.prompt_logprobs] == [
                -float(p) for p in range(len(TEXT))
            ]
            assert [choice.token_ids for choice in joined.choices] == [
                expected(index=0),
                expected(index=1),
            ]
            assert all(len(choice.logprobs) == 8 for choice in joined.choices)
            with pytest.raises(ValueError, match="not read"):
                join(events[:-1])
            await server.at_rest()

    asyncio.run(main())


def without_times(result: results.Result) -> Any:
    choices = [
        (c.index, c.text, c.token_ids, c.logprobs, c.finish_reason, c.stopped_by, c.seed)
        for c in result.choices
    ]
    usage = (result.usage.prompt_tokens, result.usage.completion_tokens)
    return result.request_id, choices, usage, result.prompt_logprobs


@pytest.mark.system
@both
def test_chat(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with running(tmp_path) as server, opened(kind, server.address) as client:
            rendered = list(b"user: hi\n")
            whole = await client.chat(TALK, seed=1, **GREEDY)
            assert whole.choices[0].token_ids == expected(rendered)
            joined = join(await client.events("chat_stream", TALK, seed=1, **GREEDY))
            assert joined.choices[0].token_ids == expected(rendered)
            assert joined.usage.prompt_tokens == len(rendered)

    asyncio.run(main())


@pytest.mark.system
@both
def test_options_of_the_chat_template(
    tmp_path: Path, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "TEMPLATE", harness.TEMPLATE + "{{ tone }}{{ enable_thinking }}")
    read = {"seed": 1, "enable_thinking": False, "chat_template_kwargs": {"tone": "тихо"}}
    unread = {"reasoning_effort": None, "verbosity": "low", "thinking_budget": 3}

    async def main() -> None:
        async with running(tmp_path) as server, opened(kind, server.address) as client:
            rendered = list("user: hi\nтихоFalse".encode())
            for given, ignored in ((read, ()), (read | unread, ("verbosity", "thinking_budget"))):
                whole = await client.chat(TALK, **given, **GREEDY)
                assert whole.choices[0].token_ids == expected(rendered)
                assert whole.ignored == ignored
                stream, events = await client.read("chat_stream", TALK, **given, **GREEDY)
                assert join(events).choices[0].token_ids == expected(rendered)
                assert stream.ignored == ignored
            whole = await client.chat(TALK, seed=1, reasoning_effort="none", **GREEDY)
            assert whole.choices[0].token_ids == expected(list(b"user: hi\nFalse"))
            with pytest.raises(RequestError, match=r"reasoning_effort is 'much'; it must be one"):
                await client.chat(TALK, reasoning_effort="much")
            with pytest.raises(RequestError, match=r"chat_template_kwargs\.messages is set by"):
                await client.chat(TALK, chat_template_kwargs={"messages": []})
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.system
@both
def test_score_tokenize_detokenize(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with running(tmp_path) as server, opened(kind, server.address) as client:
            score = await client.score(TEXT, top_logprobs=0, request_id="s")
            assert (score.request_id, score.token_ids) == ("s", tuple(IDS))
            assert [(entry.token_id, entry.logprob) for entry in score.logprobs] == [
                (token, -float(position)) for position, token in enumerate(TEXT.encode())
            ]
            assert score.total_logprob == sum(entry.logprob for entry in score.logprobs)
            assert [entry.token for entry in score.logprobs] == list(TEXT)
            assert (await client.tokenize(TEXT)).token_ids == tuple(IDS)
            talk = await client.tokenize(TALK)
            assert (talk.prompt, talk.token_ids) == ("user: hi\n", tuple(b"user: hi\n"))
            assert await client.detokenize(IDS) == TEXT
            await server.at_rest()

    asyncio.run(main())


@both
def test_embed(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with running(tmp_path, embeds=True) as server, opened(kind, server.address) as client:
            done = await client.embed([TEXT, IDS[:3]], request_id="e", priority=2, cache_salt="s")
            assert done.embeddings == (
                tuple(naive_embedding(tuple(IDS))),
                tuple(naive_embedding(tuple(IDS[:3]))),
            )
            assert (done.request_id, done.usage.prompt_tokens) == ("e", len(IDS) + 3)
            assert (await client.model_info()).embedding_dimensions == 2
            with pytest.raises(
                PurposeError, match="this model makes embeddings and generates no text"
            ):
                await client.generate(TEXT)
            with pytest.raises(
                RequestError, match=r"inputs\[1\]\.token_ids\.ids has 999\d* as entry 0"
            ):
                await client.embed([TEXT, [999]])
            await server.at_rest()

    asyncio.run(main())


@both
def test_for_operators(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with (
            running(tmp_path, seconds=0.01) as server,
            opened(kind, server.address, retries=0) as client,
        ):
            server.drain = server.readiness.set_draining
            running_one = asyncio.create_task(
                client.generate(TEXT, request_id="a", **GREEDY | {"max_tokens": 400})
            )
            while not (await client.loads()).running:
                await asyncio.sleep(0.005)
            loads = await client.loads()
            assert (loads.running, loads.waiting, loads.requests) == (1, 0, 1)
            assert 0 < loads.pages_used < loads.pages_total
            assert await client.abort(["b", "a"]) == ("a",)
            (choice,) = (await running_one).choices
            assert choice.finish_reason == "abort" and len(choice.token_ids) < 400
            model = await client.model_info()
            info = await client.server_info()
            assert (model.name, model.vocab_size, model.eos_token_ids) == (
                "fake",
                MODEL.vocab_size,
                (257,),
            )
            assert (info.versions, info.mesh, info.page_size) == (
                {"jaxserve": "0"},
                {"data": 1},
                ENGINE.page_size,
            )
            assert (
                info.limits["max_waiting_requests"] == Limits().max_waiting_requests
                and info.uptime_seconds > 0
            )
            assert await client.flush_cache() is None
            assert await client.drain() == 0 and server.readiness.phase is Phase.DRAINING
            server.readiness.set_ended()
            with pytest.raises(DrainingError):
                await client.generate(TEXT)
            await server.at_rest()

    asyncio.run(main())


@both
def test_tokens(tmp_path: Path, kind: type) -> None:
    async def main() -> None:
        async with running(tmp_path, tokens=BearerTokens(("for-clients",), "for-admins")) as server:
            async with opened(kind, server.address) as client:
                with pytest.raises(CredentialError, match="token"):
                    await client.generate(TEXT, **GREEDY)
            async with opened(kind, server.address, token="for-clients") as client:
                assert join(await client.events("stream", TEXT, **GREEDY)).choices[0].text
                with pytest.raises(AdminOnlyError):
                    await client.loads()
            async with opened(kind, server.address, token="for-admins") as client:
                assert (await client.loads()).requests == 0

    asyncio.run(main())


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("generate", (TEXT,), {"temperature": 3}, "temperature"),
    ("generate", (TEXT,), {"stop_token_ids": [-1]}, "stop_token_ids"),
    ("generate", (TEXT,), {"timeout": 0}, "timeout"),
    ("generate", (TEXT,), {"timeout": float("nan")}, "timeout"),
    ("generate", ("half \ud800",), {}, "text"),
    ("generate", ([1, 2**32],), {}, "prompt"),
    ("generate", ([1.5],), {}, "prompt"),
    ("generate", (TALK,), {}, "prompt"),
    ("generate", (TEXT,), {"priority": 2**31}, "priority"),
    ("generate", (TEXT,), {"cache_salt": b"\xff"}, "cache_salt"),
    ("generate", (TEXT,), {"request_id": 7}, "request_id"),
    ("chat", ("hi",), {}, "messages"),
    ("chat", ([{"role": "user"}],), {}, "messages[0]"),
    ("chat", ([*TALK, {"role": "user", "content": "hi", "name": "x"}],), {}, "messages[1]"),
    ("chat", ([{"role": "user", "content": None}],), {}, "messages[0].content"),
    ("chat", (TALK,), {"reasoning_effort": 3}, "reasoning_effort"),
    ("chat", (TALK,), {"enable_thinking": "no"}, "enable_thinking"),
    ("chat", (TALK,), {"thinking_budget": -1}, "thinking_budget"),
    ("chat", (TALK,), {"chat_template_kwargs": "{}"}, "chat_template_kwargs"),
    ("chat", (TALK,), {"chat_template_kwargs": {"a": object()}}, "chat_template_kwargs"),
    ("chat_stream", (TALK,), {"chat_template_kwargs": {"a": float("nan")}}, "chat_template_kwargs"),
    ("score", (TEXT,), {"top_logprobs": None}, "top_logprobs"),
    ("embed", ("hi",), {}, "inputs"),
    ("embed", (["x", "half \ud800"],), {}, "inputs[1].text"),
    ("embed", (["x", [2**32]],), {}, "inputs[1]"),
    ("embed", (["x"],), {"priority": None}, "priority"),
    ("detokenize", ("hi",), {}, "token_ids"),
    ("abort", ("hi",), {}, "request_ids"),
]


@pytest.mark.parametrize(("method", "args", "given", "field"), WRONG)
def test_what_is_wrong_by_itself_is_not_sent(
    method: str, args: tuple[Any, ...], given: dict[str, Any], field: str
) -> None:
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(RequestError) as caught,
    ):  # where nobody listens
        getattr(client, method)(*args, **given)
    assert caught.value.field == field and "\n" not in str(caught.value)


def test_an_unknown_option_is_a_type_error() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match="tempratur"):
        client.stream(TEXT, tempratur=1)  # type: ignore[call-arg]


IN_METADATA = {"ignored"}  # fields of results that come beside the message


def test_nothing_of_the_api_is_missing() -> None:
    sampling = {field.name for field in fields(SamplingParams)}
    assert set(Options.__annotations__) == {*HEADER, "timeout", *sampling}
    chat = set(inference_pb2.ChatRequest.DESCRIPTOR.fields_by_name) - {
        *HEADER,
        "messages",
        "sampling",
    }
    assert set(ChatOptions.__annotations__) - set(Options.__annotations__) == chat
    for message, kind in {
        admin_pb2.GetModelInfoResponse: descriptions.ModelInfo,
        admin_pb2.GetServerInfoResponse: descriptions.ServerInfo,
        admin_pb2.GetLoadsResponse: descriptions.Loads,
        common_pb2.Timings: results.Timings,
        common_pb2.Usage: results.Usage,
        common_pb2.Logprob: results.Logprob,
        inference_pb2.PromptInfo: results.PromptInfo,
        inference_pb2.PromptLogprobs: results.PromptLogprobs,
        inference_pb2.Delta: results.Delta,
        inference_pb2.ToolCall: results.ToolCall,
        inference_pb2.ToolCallDelta: results.ToolCallDelta,
        inference_pb2.FinishInfo: results.Finish,
        inference_pb2.GenerateResponse: results.Result,
        inference_pb2.ChatResponse: results.Result,
        inference_pb2.ScoreResponse: results.Score,
        inference_pb2.EmbedResponse: results.Embedded,
        inference_pb2.TokenizeResponse: results.Tokenized,
    }.items():
        names = {field.name for field in fields(kind)} - IN_METADATA
        assert names == set(message.DESCRIPTOR.fields_by_name), kind
    public = {name for name in dir(Client) if not name.startswith("_")}
    assert public == {name for name in dir(AsyncClient) if not name.startswith("_")}


WITHOUT_ENGINE = """
import sys
sys.modules.update({name: None for name in ("jax", "jaxlib", "jaxserve.engine", "jaxserve.server")})
import jaxserve.client
"""


@pytest.mark.system
def test_it_imports_where_there_is_no_jax() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ENGINE], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
