"""vllm.grpc.engine.VllmEngine over a socket, on the fake device."""

import asyncio
import sys
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from jaxserve.errors import ConfigError
from jaxserve.server.core.limits import Limits
from jaxserve.server.flags import ServeOptions
from jaxserve.server.grpc.vllm import NAME
from jaxserve.server.listeners import Listeners
from jaxserve.server.options import AddressOptions
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.auth import BearerTokens
from jaxserve.v1 import inference_pb2
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_model import naive_embedding
from tests.jaxserve.server.grpc.test_inference import TEXT, expected, sampling
from tests.jaxserve.server.grpc.vllm_harness import IDS, answered, failed, refused, request, serving
from tests.jaxserve.server.harness import until

LONG = 400  # tokens of a stream that is still under way when somebody ends it


def test_whole_and_streamed(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (server, engine):
            chunks, completes = await answered(engine, request(n=2, max_tokens=20))
            assert not chunks and [complete.index for complete in completes] == [0, 1]
            for complete in completes:
                assert list(complete.output_ids) == expected(n=20, index=complete.index)
                assert (complete.prompt_tokens, complete.completion_tokens) == (len(IDS), 20)
                assert (
                    complete.finish_reason == "length"
                    and complete.WhichOneof("matched_stop") is None
                )
            chunks, completes = await answered(engine, request(stream=True, n=2, max_tokens=20))
            for index in (0, 1):
                mine = [chunk for chunk in chunks if chunk.index == index]
                assert len(mine) > 1, "it comes in pieces"
                assert [token for chunk in mine for token in chunk.token_ids] == expected(
                    n=20, index=index
                )
                assert all(chunk.completion_tokens == len(chunk.token_ids) for chunk in mine)
                assert {chunk.prompt_tokens for chunk in mine} == {len(IDS)}
                assert list(completes[index].output_ids) == expected(n=20, index=index)
            text = pb.GenerateRequest(text=TEXT, sampling_params=request().sampling_params)
            _, (complete,) = await answered(engine, text)
            assert list(complete.output_ids) == expected()
            await server.at_rest()

    asyncio.run(main())


def test_cached_tokens(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, page_size=4) as (server, engine):
            _, (cold,) = await answered(engine, request())
            await server.at_rest()
            chunks, (warm,) = await answered(engine, request(stream=True))
            held = (len(IDS) - 1) // 4 * 4
            assert cold.cached_tokens == 0 and warm.cached_tokens == held
            assert {chunk.cached_tokens for chunk in chunks} == {held}

    asyncio.run(main())


def test_logprobs(tmp_path: Path) -> None:
    """Log-probabilities are those that jaxserve.v1 reports."""
    asked = {"logprobs": 2, "prompt_logprobs": 1}

    async def main() -> None:
        async with serving(tmp_path) as (server, engine):
            own = await server.inference.Generate(
                inference_pb2.GenerateRequest(text=TEXT, sampling=sampling(**asked))
            )
            _, (complete,) = await answered(engine, request(**asked))
            scores = complete.output_logprobs
            assert list(scores.token_ids) == expected()
            assert list(scores.token_logprobs) == [
                entry.chosen.logprob for entry in own.choices[0].logprobs
            ]
            for top, entry in zip(scores.top_logprobs, own.choices[0].logprobs, strict=True):
                assert list(top.token_ids) == [one.token_id for one in entry.top]
                assert list(top.values) == [one.logprob for one in entry.top]
            prompt = complete.input_logprobs
            assert list(prompt.token_ids) == IDS
            assert (
                not prompt.token_logprobs[0].HasField("value")
                and not prompt.top_logprobs[0].token_ids
            )
            values = [entry.value for entry in prompt.token_logprobs[1:]]
            assert (
                values == [entry.chosen.logprob for entry in own.prompt_logprobs]
                and values[1] != values[2]
            )
            assert len(prompt.top_logprobs) == len(IDS)

            chunks, (end,) = await answered(engine, request(stream=True, **asked))
            pieces = [chunk.output_logprobs for chunk in chunks]
            assert [value for piece in pieces for value in piece.token_logprobs] == list(
                scores.token_logprobs
            )
            assert chunks[0].input_logprobs == prompt
            assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
            assert not end.HasField("output_logprobs") and not end.HasField("input_logprobs")

            _, (bare,) = await answered(engine, request(logprobs=0))
            assert list(bare.output_logprobs.token_logprobs) == list(scores.token_logprobs)
            assert not bare.output_logprobs.top_logprobs
            _, (none,) = await answered(engine, request())
            assert not none.HasField("output_logprobs")

    asyncio.run(main())


def test_what_ends_a_choice(tmp_path: Path) -> None:
    tokens = expected(n=20)
    text = ByteTokenizer().decode(tokens)
    stop = text[7:10]
    token = tokens[5]
    assert stop not in text[:9] and token not in tokens[:5]

    async def main() -> None:
        async with serving(tmp_path) as (server, engine):
            _, (by_text,) = await answered(engine, request(max_tokens=20, stop=["nowhere", stop]))
            assert (by_text.finish_reason, by_text.matched_stop_str) == ("stop", stop)
            assert list(by_text.output_ids) == tokens[:10]
            _, (by_token,) = await answered(
                engine, request(stream=True, max_tokens=20, stop_token_ids=[token])
            )
            assert (by_token.finish_reason, by_token.matched_token_id) == ("stop", token)
            assert list(by_token.output_ids) == tokens[:6]
            _, (later,) = await answered(
                engine, request(max_tokens=20, min_tokens=20, stop_token_ids=[token])
            )
            assert later.completion_tokens == 20
            await server.at_rest()

    asyncio.run(main())


def test_the_models_own_end_is_no_match(tmp_path: Path) -> None:
    token = expected(n=8)[3]
    assert token not in expected(n=3)

    async def main() -> None:
        async with serving(tmp_path) as (server, engine):
            object.__setattr__(server.service.prompts, "eos_ids", (token,))
            _, (complete,) = await answered(engine, request())
            assert (complete.finish_reason, list(complete.output_ids)) == ("stop", expected(n=4))
            assert complete.WhichOneof("matched_stop") is None
            _, (complete,) = await answered(engine, request(ignore_eos=True))
            assert (complete.finish_reason, list(complete.output_ids)) == ("length", expected())

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_abort_ends_the_stream(tmp_path: Path, stream: bool) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.002) as (server, engine):
            asked = request(stream=stream, request_id="mine", max_tokens=LONG)
            waiting = asyncio.create_task(answered(engine, asked))
            while not server.service.loads.running:
                await asyncio.sleep(0.002)
            await engine.Abort(pb.AbortRequest(request_ids=["mine", "nobody's"]))
            _, (complete,) = await asyncio.wait_for(waiting, 60)
            assert complete.finish_reason == "abort" and complete.completion_tokens < LONG
            await server.at_rest()

    asyncio.run(main())


def test_abort_leaves_other_doors_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.002) as (server, engine):
            asked = inference_pb2.GenerateRequest(
                request_id="theirs", text=TEXT, sampling=sampling(max_tokens=100)
            )
            waiting = asyncio.ensure_future(server.inference.Generate(asked))
            while not server.service.loads.running:
                await asyncio.sleep(0.002)
            await refused(engine.Generate(request(request_id="theirs")), "ALREADY_EXISTS")
            await engine.Abort(pb.AbortRequest(request_ids=["theirs"]))
            assert (await waiting).usage.completion_tokens == 100

            ours = asyncio.create_task(
                answered(engine, request(request_id="ours", max_tokens=LONG))
            )
            while not server.service.loads.running:
                await asyncio.sleep(0.002)
            await refused(engine.Generate(request(request_id="ours")), "ALREADY_EXISTS")
            await engine.Abort(pb.AbortRequest(request_ids=["ours"]))
            assert (await ours)[1][0].finish_reason == "abort"

    asyncio.run(main())


def test_abort_needs_the_token_of_the_request(tmp_path: Path) -> None:
    async def main() -> None:
        tokens = BearerTokens(("client's",), "admin's")
        async with serving(tmp_path, seconds=0.002, tokens=tokens) as (server, engine):
            client, admin = ([("authorization", f"Bearer {of}")] for of in ("client's", "admin's"))
            asked = request(stream=True, request_id="mine", max_tokens=LONG)
            call = engine.Generate(asked, metadata=admin)
            while not server.service.loads.running:
                await asyncio.sleep(0.002)
            abort = pb.AbortRequest(request_ids=["mine"])
            await engine.Abort(abort, metadata=client)
            assert await call.read()  # goes on
            await engine.Abort(abort, metadata=admin)
            while (message := await call.read()) is not aio.EOF:
                last = message
            assert last.complete.finish_reason == "abort"
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["Generate", "Embed"])
def test_abort_ends_no_request_of_another_token_that_has_its_id(tmp_path: Path, kind: str) -> None:
    """A call with an id that is in flight is refused, and gives no right to abort it meanwhile."""
    tokens = BearerTokens(("mine", "another's"))
    mine, others = ([("authorization", f"Bearer {token}")] for token in ("mine", "another's"))
    embed = pb.EmbedRequest(request_id="mine", tokenized=pb.TokenizedInput(input_ids=IDS))

    async def main() -> None:
        async with serving(tmp_path, seconds=0.002, tokens=tokens) as (server, engine):
            asked = request(stream=True, request_id="mine")

            async def again() -> None:
                if kind == "Embed":
                    await failed(engine.Embed(embed, metadata=others))
                else:
                    await refused(engine.Generate(asked, metadata=others), "ALREADY_EXISTS")

            async def abort() -> None:
                await engine.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=others)

            with server.holding(step=2):
                call = engine.Generate(asked, metadata=mine)
                await until(lambda: server.service.in_flight)
                await asyncio.gather(*[act() for _ in range(10) for act in (again, abort)])
            last = [message async for message in call][-1]
            assert last.complete.finish_reason == "length"
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_pages(tmp_path: Path, stream: bool) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.002) as (server, engine):
            call = engine.Generate(request(stream=stream, max_tokens=LONG))
            while not server.service.loads.pages_used:
                await asyncio.sleep(0.002)
            call.cancel()
            await server.at_rest()
            assert server.runner.steps < LONG

    asyncio.run(main())


@pytest.mark.system
def test_statuses(tmp_path: Path) -> None:
    async def main() -> None:
        limits = Limits(max_waiting_requests=1)
        async with serving(tmp_path, opened=False, max_batch=1, limits=limits) as (
            server,
            engine,
        ):
            assert (
                await failed(engine.GetModelInfo(pb.GetModelInfoRequest()))
                is grpc.StatusCode.UNAVAILABLE
            )
            await refused(engine.Generate(request()), "UNAVAILABLE")
            server.open()
            with server.holding(step=10):
                running_ = asyncio.create_task(
                    answered(engine, request(request_id="first", max_tokens=50))
                )
                await until(lambda: server.service.loads.running and not server.service._load.queue)
                await refused(engine.Generate(request(request_id="first")), "ALREADY_EXISTS")
                late = engine.Generate(request(max_tokens=LONG), timeout=0.05)
                with pytest.raises(aio.AioRpcError) as caught:
                    await late.read()
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                queued = asyncio.create_task(answered(engine, request(request_id="second")))
                await until(lambda: server.service._load.queue)
                await refused(engine.Generate(request(request_id="third")), "RESOURCE_EXHAUSTED")
            server.readiness.set_draining()
            server.readiness.set_ended()
            await refused(engine.Generate(request()), "UNAVAILABLE")
            assert (
                (await running_)[1][0].finish_reason
                == (await queued)[1][0].finish_reason
                == "length"
            )
            assert await failed(engine.Embed(pb.EmbedRequest())) is grpc.StatusCode.UNAVAILABLE
            flushed = engine.FlushCache(common_pb2.FlushCacheRequest())
            assert await failed(flushed) is grpc.StatusCode.UNIMPLEMENTED
            await server.at_rest()

    asyncio.run(main())


def test_health_in_every_phase(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, opened=False) as (server, engine):
            probe = health_pb2_grpc.HealthStub(server.channel)
            Serving = health_pb2.HealthCheckResponse.ServingStatus

            async def health(phase: str) -> tuple[bool, bool]:
                answer = await engine.HealthCheck(pb.HealthCheckRequest())
                await asyncio.sleep(0.01)  # grpc.health.v1 is told by a task
                status = (await probe.Check(health_pb2.HealthCheckRequest(service=NAME))).status
                assert answer.message == phase
                return answer.healthy, status == Serving.SERVING

            assert await health("loading") == (False, False)
            server.open()
            assert await health("ready") == (True, True)
            server.readiness.set_draining()
            assert await health("draining") == (False, False)
            server.readiness.set_ended()
            assert await health("ended") == (False, False)
            server.readiness.set_failed()
            assert await health("failed") == (False, False)

    asyncio.run(main())


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.005) as (server, engine):
            model = await engine.GetModelInfo(pb.GetModelInfoRequest())
            assert (model.served_model_name, model.vocab_size, model.max_context_length) == (
                "fake",
                258,
                512,
            )
            assert (
                model.is_generation
                and list(model.eos_token_ids) == [257]
                and model.bos_token_id == 256
            )
            assert not Path(model.tokenizer_path).exists()
            idle = (await engine.GetLoads(pb.GetLoadsRequest(include=["core"]))).loads[0]
            assert (idle.num_running_reqs, idle.token_usage, idle.max_total_num_tokens) == (
                0,
                0,
                2048,
            )
            assert idle.max_running_requests == 4
            calls = [
                asyncio.create_task(answered(engine, request(max_tokens=100, n=2)))
                for _ in range(4)
            ]
            while (server.service.loads.running, server.service.loads.waiting) != (4, 4):
                await asyncio.sleep(0.002)
            busy = (await engine.GetLoads(pb.GetLoadsRequest())).loads[0]
            assert (busy.num_running_reqs, busy.num_waiting_reqs, busy.num_total_reqs) == (4, 4, 8)
            assert 0 < busy.token_usage < 1 and busy.num_used_tokens > 0
            assert busy.num_waiting_uncached_tokens in [
                waiting * len(IDS) for waiting in (1, 2, 3, 4)
            ]
            info = await engine.GetServerInfo(pb.GetServerInfoRequest())
            assert (info.active_requests, info.is_paused, info.max_num_seqs) == (4, False, 4)
            assert (
                await failed(engine.GetLoads(pb.GetLoadsRequest(dp_rank=1)))
                is grpc.StatusCode.INVALID_ARGUMENT
            )
            await asyncio.gather(*calls)

    asyncio.run(main())


def test_tokens_are_asked_for_as_on_every_port(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, tokens=BearerTokens(("secret",))) as (_, engine):
            unknown = grpc.StatusCode.UNAUTHENTICATED
            assert await failed(engine.GetModelInfo(pb.GetModelInfoRequest())) is unknown
            assert await failed(engine.Abort(pb.AbortRequest(request_ids=["x"]))) is unknown
            await refused(engine.Generate(request()), "UNAUTHENTICATED")
            metadata = (("authorization", "Bearer secret"),)
            assert await engine.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata)

    asyncio.run(main())


def test_embed(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, embeds=True) as (server, engine):
            asked = pb.EmbedRequest(request_id="mine", tokenized=pb.TokenizedInput(input_ids=IDS))
            answer = await engine.Embed(asked)
            assert list(answer.embedding) == naive_embedding(tuple(IDS))
            assert (answer.prompt_tokens, answer.embedding_dim) == (len(IDS), 2)
            assert not (await engine.GetModelInfo(pb.GetModelInfoRequest())).is_generation
            assert await failed(engine.Embed(pb.EmbedRequest())) is grpc.StatusCode.INVALID_ARGUMENT
            await refused(engine.Generate(request()), "UNIMPLEMENTED")
            await server.at_rest()

    asyncio.run(main())


def test_a_checkpoint_without_a_tokenizer_file(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (_, engine):
            for _ in range(2):
                _, text = await refused(
                    engine.GetTokenizer(common_pb2.GetTokenizerRequest()), "UNIMPLEMENTED"
                )
                assert "tokenizer.json" in text and str(tmp_path) not in text

    asyncio.run(main())


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "smg_grpc_proto",
        "jaxserve.server.grpc.vllm",
        "jaxserve.server.grpc.vllm_parse",
        "jaxserve.server.grpc.vllm_render",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    options = ServeOptions(addresses=AddressOptions(port=0, http=False, vllm_port=0))
    listeners = Listeners(Readiness(), Limits(), BearerTokens(), AsyncMock())
    with pytest.raises(ConfigError, match=r"pip install 'jaxserve\[smg\]'"):
        asyncio.run(listeners.start(options, Mock(), Mock()))
