"""jaxserve.v1 over a socket, on the fake device."""

import asyncio
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from jaxserve.server.grpc import render
from jaxserve.server.observe.metrics import Metrics
from jaxserve.v1 import common_pb2, inference_pb2
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_model import naive
from tests.jaxserve.engine.host.driver import request as engine_request
from tests.jaxserve.server.harness import running

TEXT = "The quick brown fox"


def sampling(**given: object) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"seed": 1, "max_tokens": 8, "temperature": 0} | given)  # type: ignore[arg-type]


def expected(text: str = TEXT, n: int = 8, index: int = 0) -> list[int]:
    """Compute the fake device's answer by its arithmetic over a plain list."""
    prompt = tuple(ByteTokenizer().encode(text))
    return naive(engine_request(prompt=prompt, max_tokens=n, temperature=0), index, 1, n)


def test_unary(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            request = inference_pb2.GenerateRequest(
                request_id="mine", text=TEXT, sampling=sampling()
            )
            response = await server.inference.Generate(request)
            (choice,) = response.choices
            assert response.request_id == "mine"
            assert list(choice.token_ids) == expected()
            assert choice.text == ByteTokenizer().decode(expected())
            assert choice.finish.reason == common_pb2.FINISH_REASON_LENGTH
            assert response.usage.prompt_tokens == len(TEXT) + 1
            assert response.usage.completion_tokens == 8
            times = choice.finish.timings
            assert 0 <= times.queue_seconds <= times.first_token_seconds <= times.total_seconds
            await server.at_rest()

    asyncio.run(main())


def test_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            request = inference_pb2.GenerateStreamRequest(
                text=TEXT, sampling=sampling(n=2, max_tokens=20)
            )
            events = [event async for event in server.inference.GenerateStream(request)]
            kinds = [event.WhichOneof("event") for event in events]
            assert (
                kinds[0] == "prompt_info"
                and kinds[-1] == "finish_info"
                and set(kinds[1:-1]) == {"delta"}
            )
            assert events[0].prompt_info.request_id.startswith("req-")
            for index in (0, 1):
                deltas = [e.delta for e in events[1:-1] if e.delta.index == index]
                assert [t for d in deltas for t in d.token_ids] == expected(n=20, index=index)
                assert "".join(d.text for d in deltas) == ByteTokenizer().decode(
                    expected(n=20, index=index)
                )
            finish = events[-1].finish_info
            assert [choice.index for choice in finish.choices] == [0, 1]
            assert finish.usage.completion_tokens == 40
            await server.at_rest()

    asyncio.run(main())


def test_stop_string_across_messages(tmp_path: Path) -> None:
    text = ByteTokenizer().decode(expected(n=20))
    stop = text[7:10]
    assert stop not in text[:9]

    async def main() -> None:
        async with running(tmp_path) as server:
            params = sampling(max_tokens=20, stop=[stop], logprobs=0)
            request = inference_pb2.GenerateStreamRequest(text=TEXT, sampling=params)
            events = [event async for event in server.inference.GenerateStream(request)]
            deltas = [event.delta for event in events[1:-1]]
            assert "".join(delta.text for delta in deltas) == text[:7]
            assert (
                sum(len(delta.token_ids) for delta in deltas)
                == sum(len(delta.logprobs) for delta in deltas)
                == 10
            )
            (choice,) = events[-1].finish_info.choices
            assert (choice.reason, choice.stop_string) == (common_pb2.FINISH_REASON_STOP, stop)
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.system
def test_chat_renders_the_template(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            messages = [inference_pb2.ChatMessage(role="user", content="hi")]
            response = await server.inference.Chat(
                inference_pb2.ChatRequest(messages=messages, sampling=sampling())
            )
            assert response.usage.prompt_tokens == len("user: hi\n")
            tokenized = await server.inference.Tokenize(
                inference_pb2.TokenizeRequest(
                    conversation=inference_pb2.Conversation(messages=messages)
                )
            )
            assert tokenized.prompt == "user: hi\n"
            text = await server.inference.Detokenize(
                inference_pb2.DetokenizeRequest(token_ids=tokenized.token_ids)
            )
            assert text.text == "user: hi\n"

    asyncio.run(main())


def test_score(tmp_path: Path) -> None:
    metrics = Metrics(lambda: 0)

    async def main() -> None:
        async with running(tmp_path, observers=(metrics,)) as server:
            response = await server.inference.Score(inference_pb2.ScoreRequest(text=TEXT))
            assert list(response.token_ids) == ByteTokenizer().encode(TEXT)
            assert [entry.chosen.token_id for entry in response.logprobs] == list(TEXT.encode())
            assert [entry.chosen.logprob for entry in response.logprobs] == [
                -float(p) for p in range(len(TEXT))
            ]
            await server.at_rest()
            assert f"jaxserve:prompt_tokens_total {len(TEXT) + 1}.0" in metrics.render().decode()

    asyncio.run(main())


INVALID = "INVALID_ARGUMENT", "INVALID_FIELD"


@pytest.mark.parametrize(
    "request_, code, reason, field",
    [
        ({}, *INVALID, "prompt"),
        ({"text": ""}, None, None, None),  # BOS
        ({"text": "x", "sampling": {"temperature": 2.1}}, *INVALID, "sampling.temperature"),
        ({"text": "x", "sampling": {"top_k": -1}}, *INVALID, "sampling.top_k"),
        ({"token_ids": {"ids": [1, 258]}}, *INVALID, "token_ids.ids"),
        (
            {"text": "x", "sampling": {"stop_token_ids": [9**9]}},
            *INVALID,
            "sampling.stop_token_ids",
        ),
        ({"text": "x" * 600}, "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED", "text"),
        ({"text": "x", "request_id": "r" * 129}, *INVALID, "request_id"),
        ({"text": "x", "priority": 101}, *INVALID, "priority"),
    ],
)  # fmt: skip
def test_statuses(
    tmp_path: Path,
    request_: dict[str, object],
    code: str | None,
    reason: str | None,
    field: str | None,
) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            given = {"sampling": {"max_tokens": 4}} | request_
            call = server.inference.Generate(inference_pb2.GenerateRequest(**given))  # type: ignore[arg-type]
            if code is None:
                await call
                return
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode[code]
            status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
            infos = [d for d in status.details if d.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
            info = error_details_pb2.ErrorInfo()
            bad = error_details_pb2.BadRequest()
            assert len(infos) == 1 and infos[0].Unpack(info) and status.details[1].Unpack(bad)
            assert (info.domain, info.reason) == ("jaxserve", reason)
            assert bad.field_violations[0].field == field
            await server.at_rest()

    asyncio.run(main())


def test_scores_of_one_step_in_several_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message says the position of its first token."""
    monkeypatch.setattr(render, "MAX_ENTRIES", 6)

    async def main() -> None:
        async with running(tmp_path) as server:
            asked = sampling(max_tokens=1, prompt_logprobs=1)
            request = inference_pb2.GenerateStreamRequest(text="x" * 20, sampling=asked)
            events = [event async for event in server.inference.GenerateStream(request)]
            parts = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
            assert len(parts) > 3
            position = 1  # the first token has no score
            for part in parts:
                assert part.start == position
                position += len(part.entries)
            assert position == events[0].prompt_info.prompt_tokens

    asyncio.run(main())
