"""Embed over a socket, on the fake device: several inputs in one request, and how it ends."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from jaxserve.errors import QueueFullError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.embedding import AT_ONCE, MAX_INPUTS
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.service import IncomingRequest
from jaxserve.server.observe.metrics import Metrics
from jaxserve.v1 import admin_pb2, common_pb2, inference_pb2
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_model import naive_embedding
from tests.jaxserve.server.harness import Running, running, until

TEXT = "The quick brown fox"
LONG = "x" * 200


def ask(
    server: Running, inputs: Sequence[str | list[int]], timeout: float | None = None, **given: Any
) -> Any:
    """Start a call."""
    entries = [
        inference_pb2.EmbedInput(text=each)
        if isinstance(each, str)
        else inference_pb2.EmbedInput(token_ids=common_pb2.TokenIds(ids=each))
        for each in inputs
    ]
    return server.inference.Embed(
        inference_pb2.EmbedRequest(inputs=entries, **given), timeout=timeout
    )


def expected(prompt: str | list[int]) -> list[float]:
    return naive_embedding(
        tuple(ByteTokenizer().encode(prompt) if isinstance(prompt, str) else prompt)
    )


async def failure(call: Any, code: str) -> tuple[str, str]:
    """Return the reason of an error's ErrorInfo, and its text."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode[code], caught.value
    info = error_details_pb2.ErrorInfo()
    assert rpc_status.from_call(caught.value).details[0].Unpack(info)  # type: ignore[arg-type]
    return info.reason, caught.value.details() or ""


def test_texts_and_token_ids(tmp_path: Path) -> None:
    metrics = Metrics(lambda: 0)

    async def main() -> None:
        async with running(tmp_path, embeds=True, step_tokens=16, observers=(metrics,)) as server:
            inputs = [TEXT, [5, 6, 7], LONG, "", TEXT]
            done = await ask(server, inputs, request_id="mine")
            assert [list(e.values) for e in done.embeddings] == [expected(each) for each in inputs]
            tokens = 2 * (len(TEXT) + 1) + 3 + len(LONG) + 1 + 1
            assert (done.request_id, done.usage.prompt_tokens, done.usage.completion_tokens) == (
                "mine",
                tokens,
                0,
            )
            again = await ask(server, [LONG])
            assert again.embeddings[0] == done.embeddings[2] and again.request_id.startswith("req-")
            assert again.usage.cached_prompt_tokens == len(LONG)
            await server.at_rest()
            counted = metrics.render().decode()
            for line in (
                f"prompt_tokens_total {tokens + len(LONG) + 1}.0",
                f"prefix_cache_hits_total {done.usage.cached_prompt_tokens + len(LONG)}.0",
                'request_success_total{finished_reason="stop"} 6.0',
                "e2e_request_latency_seconds_count 6.0",
                "generation_tokens_total 0.0",
            ):
                assert f"jaxserve:{line}\n" in counted, line

    asyncio.run(main())


def test_each_model_does_one_thing(tmp_path: Path) -> None:
    metrics = Metrics(lambda: 0)
    refusal = (
        "PURPOSE",
        "this model makes embeddings and generates no text (ask for embeddings)",
    )
    messages = [inference_pb2.ChatMessage(role="u", content="hi")]

    async def main() -> None:
        async with running(tmp_path, embeds=True, observers=(metrics,)) as server:
            stub = server.inference
            for call in (
                stub.Generate(inference_pb2.GenerateRequest(text=TEXT)),
                stub.GenerateStream(inference_pb2.GenerateStreamRequest(text=TEXT)).read(),
                stub.Chat(inference_pb2.ChatRequest(messages=messages)),
                stub.ChatStream(inference_pb2.ChatStreamRequest(messages=messages)).read(),
                stub.Score(inference_pb2.ScoreRequest(text=TEXT)),
            ):
                assert await failure(call, "UNIMPLEMENTED") == refusal
            found = await stub.Tokenize(inference_pb2.TokenizeRequest(text=TEXT))
            assert list(found.token_ids) == ByteTokenizer().encode(TEXT)
            info = await server.admin.GetModelInfo(admin_pb2.GetModelInfoRequest())
            assert info.embedding_dimensions == 2
        async with running(tmp_path, observers=(metrics,)) as server:
            assert await failure(ask(server, ["x"] * 300), "UNIMPLEMENTED") == (
                "PURPOSE",
                "this model generates text and makes no embeddings (serve one that embeds)",
            )
        assert 'request_failure_total{reason="PURPOSE"} 6.0' in metrics.render().decode()

    asyncio.run(main())


def test_one_wrong_input_ends_them_all(tmp_path: Path) -> None:
    """The error has the path of the wrong input; inputs that run already are ended."""

    async def main() -> None:
        async with running(tmp_path, embeds=True, seconds=0.002) as server:
            for wrong, field in (
                ([1, 258], "inputs[4].token_ids.ids"),
                ("y" * 600, "inputs[4].text"),
            ):
                reason, text = await failure(
                    ask(server, [LONG] * 4 + [wrong, TEXT]), "INVALID_ARGUMENT"
                )
                assert reason in ("INVALID_FIELD", "CONTEXT_LENGTH_EXCEEDED") and text.startswith(
                    (f"{field}: ", f"{field} ")
                )
                await server.at_rest()
            assert list((await ask(server, [TEXT])).embeddings[0].values) == expected(TEXT)

    asyncio.run(main())


def test_many_inputs_leave_others_their_turn(tmp_path: Path) -> None:
    """A single text that comes later is done long before the many inputs are."""

    async def main() -> None:
        async with running(tmp_path, embeds=True, seconds=0.0005, prefix_cache=False) as server:
            many = [f"{i:04}" + "x" * 40 for i in range(600)]
            bulk = ask(server, many)
            task = asyncio.ensure_future(bulk)
            while not server.runner.steps:
                await asyncio.sleep(0.001)
            before = server.runner.steps
            await ask(server, [TEXT])
            assert server.service.in_flight <= AT_ONCE and server.runner.steps - before < 200
            assert not task.done()
            done = await task
            assert [list(e.values) for e in done.embeddings] == [expected(each) for each in many]
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("limits", [Limits(max_waiting_requests=3), Limits(max_waiting_tokens=500)])
def test_a_request_waits_for_room_that_it_takes_itself(tmp_path: Path, limits: Limits) -> None:
    metrics = Metrics(lambda: 0)

    async def main() -> None:
        async with running(
            tmp_path, embeds=True, limits=limits, seconds=0.001, observers=(metrics,)
        ) as server:
            inputs = [f"{i}{LONG}" for i in range(12)]
            done = await ask(server, inputs)
            assert [list(e.values) for e in done.embeddings] == [expected(each) for each in inputs]
            await server.at_rest()
            assert "request_failure_total{" not in metrics.render().decode(), "nobody was refused"

    asyncio.run(main())


def test_a_queue_that_others_fill_refuses(tmp_path: Path) -> None:
    metrics = Metrics(lambda: 0)

    async def main() -> None:
        limits = Limits(max_waiting_requests=2)
        async with running(
            tmp_path, embeds=True, limits=limits, seconds=0.01, step_tokens=16, observers=(metrics,)
        ) as server:
            others = [ask(server, [f"{i}{LONG}"]) for i in range(2)]
            while server.service.in_flight < 2:
                await asyncio.sleep(0.001)
            reason, text = await failure(ask(server, [TEXT, TEXT]), "RESOURCE_EXHAUSTED")
            assert reason == "QUEUE_FULL" and "--max-waiting-requests" in text
            await asyncio.gather(*others)
            await server.at_rest()
            assert 'request_failure_total{reason="QUEUE_FULL"} 1.0' in metrics.render().decode()

    asyncio.run(main())


def test_the_last_of_its_own_may_end_before_the_queue_says_no(tmp_path: Path) -> None:
    """A full queue is an error once none of the request's own inputs runs any more."""

    async def main() -> None:
        async with running(tmp_path, embeds=True, max_context=4096, num_pages=2048) as server:
            answer = server.service.answer
            asked = list[bool]()

            async def answering(call: IncomingRequest, retries_itself: bool = False) -> Answer:
                asked.append(retries_itself)
                if len(asked) == 1:
                    return await answer(call)
                while server.service.in_flight:
                    await asyncio.sleep(0.001)
                raise QueueFullError("others were quicker", 1.0)

            server.service.answer = answering  # type: ignore[method-assign]
            call = ask(server, [TEXT, LONG], timeout=60)
            reason, text = await failure(call, "RESOURCE_EXHAUSTED")
            assert (reason, text) == ("QUEUE_FULL", "others were quicker") and asked == [
                False,
                True,
                False,
            ]
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize("ending", ["cancelled", "deadline", "abort", "age"])
def test_however_it_ends_everything_comes_back(tmp_path: Path, ending: str) -> None:
    limits = Limits(max_request_seconds=0.2) if ending == "age" else Limits()

    async def main() -> None:
        async with running(
            tmp_path, embeds=True, limits=limits, seconds=0.01, step_tokens=16
        ) as server:
            timeout = 0.2 if ending == "deadline" else None
            call = ask(server, [f"{i}{LONG}" for i in range(200)], timeout, request_id="a")
            while ending in ("cancelled", "abort") and server.service.in_flight < 100:
                await asyncio.sleep(0.001)
            if ending == "cancelled":
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            elif ending == "abort":
                ended = await server.admin.Abort(admin_pb2.AbortRequest(request_ids=["a-7", "a"]))
                assert list(ended.aborted_request_ids) == ["a-7"]
                reason, text = await failure(call, "CANCELLED")
                assert (reason, text) == (
                    "ABORTED",
                    "request 'a-7' was aborted before it was embedded",
                )
            else:
                with pytest.raises(aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await server.at_rest()

    asyncio.run(main())


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    """A request with values that are not finite fails; another one in the same step does not."""

    async def main() -> None:
        async with running(tmp_path, embeds=True) as server:
            server.runner.spoils = lambda number, lane, row: row == 2
            with server.holding():
                first = asyncio.ensure_future(ask(server, ["first"]))
                await until(lambda: server.runner.steps)
                good = ask(server, ["good"])
                await until(lambda: len(server.service._answers) == 2)
                bad = ask(server, ["bad"])
                await until(lambda: len(server.service._answers) == 3)
            reason, text = await failure(bad, "INTERNAL")
            assert (
                reason == "NON_FINITE_LOGITS"
                and "the values after 4 tokens are NaN or infinite" in text
            )
            assert list((await good).embeddings[0].values) == expected("good")
            await first
            await server.at_rest()

    asyncio.run(main())


def test_what_is_asked_at_most_is_not_refused_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, embeds=True, max_batch=16) as server:
            done = await ask(server, ["x"] * MAX_INPUTS)
            assert len(done.embeddings) == MAX_INPUTS
            reason, text = await failure(ask(server, ["x"] * (MAX_INPUTS + 1)), "INVALID_ARGUMENT")
            assert (reason, text) == ("INVALID_FIELD", "inputs has 2049 entries; give 1 to 2048")

    asyncio.run(main())
