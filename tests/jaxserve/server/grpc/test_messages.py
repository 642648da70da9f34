"""Bounds on the messages of gRPC."""

import asyncio
import gc
import gzip
import random
import threading
import zlib
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2 as details
from google.rpc.status_pb2 import Status
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc import messages
from jaxserve.server.grpc.messages import (
    MAX_WAITING,
    RETRY_SECONDS,
    MessageError,
    MessageTooLargeError,
    expand,
    is_compressed,
)
from jaxserve.server.security.auth import BearerTokens
from jaxserve.v1 import common_pb2, inference_pb2
from tests.jaxserve.server.grpc.undisturbed import held, undisturbed
from tests.jaxserve.server.harness import Running, running, until

METHOD = "/jaxserve.v1.InferenceService/Tokenize"
GZIP = grpc.Compression.Gzip
DEFLATE = grpc.Compression.Deflate
TEXT = "the quick brown fox " * 20


async def failure(call: aio.Call) -> tuple[str, str]:
    """Return the code and the reason of a call that fails."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    metadata = dict(caught.value.trailing_metadata())
    status = Status.FromString(metadata["grpc-status-details-bin"])
    info = details.ErrorInfo()
    assert status.details[0].Unpack(info)
    return caught.value.code().name, info.reason


@pytest.mark.parametrize("compression", [GZIP, DEFLATE])
def test_compressed_messages_are_answered_as_others_are(
    tmp_path: Path, compression: grpc.Compression
) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            tokenize = inference_pb2.TokenizeRequest(text=TEXT)
            plain = await server.inference.Tokenize(tokenize)
            assert await server.inference.Tokenize(tokenize, compression=compression) == plain

            sampling = common_pb2.SamplingParams(max_tokens=3, seed=1)
            question = inference_pb2.GenerateStreamRequest(text=TEXT, sampling=sampling)
            found = []
            for chosen in (None, compression):
                call = server.inference.GenerateStream(question, compression=chosen)
                found.append("".join([message.delta.text async for message in call]))
            assert found[0] == found[1]

            request = reflection_pb2.ServerReflectionRequest(
                list_services="", host="a name that is long enough to be compressed " * 10
            )
            for version in ("v1", "v1alpha"):
                call = reflected(server, version)(iter([request] * 2), compression=compression)
                assert len([message async for message in call]) == 2
            await server.at_rest()
            assert held(server) == 0

    asyncio.run(main())


def reflected(server: Running, version: str) -> aio.StreamStreamMultiCallable:
    return server.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_has_two_names(tmp_path: Path, version: str) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            asked = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(
                    file_containing_symbol=f"grpc.reflection.{version}.ServerReflection"
                ),
                reflection_pb2.ServerReflectionRequest(
                    file_containing_symbol="jaxserve.v1.InferenceService"
                ),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="nothing"),
            ]
            call = reflected(server, version)(iter(asked))
            services, own, inference, nothing = [message async for message in call]
            names = [each.name for each in services.list_services_response.service]
            assert f"grpc.reflection.{version}.ServerReflection" in names
            assert "jaxserve.v1.InferenceService" in names
            (file,) = own.file_descriptor_response.file_descriptor_proto
            described = FileDescriptorProto.FromString(file)
            assert described.package == f"grpc.reflection.{version}"
            assert len(inference.file_descriptor_response.file_descriptor_proto) > 1
            assert nothing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]

    asyncio.run(main())


def test_what_expands_beyond_the_limit(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, limits=Limits(max_message_bytes=100_000)) as server:
            for size, compression, reason in (
                (4000, GZIP, "CONTEXT_LENGTH_EXCEEDED"),
                (90_000, GZIP, "CONTEXT_LENGTH_EXCEEDED"),
                (100_001, GZIP, "REQUEST_TOO_LARGE"),
                (30_000_000, GZIP, "REQUEST_TOO_LARGE"),
                (30_000_000, DEFLATE, "REQUEST_TOO_LARGE"),
            ):
                request = inference_pb2.GenerateRequest(text="x" * size)
                call = server.inference.Generate(request, compression=compression)
                assert (await failure(call))[1] == reason, size
            await until(lambda: held(server) == 0)  # a moment after the client has its status
            assert await server.inference.Tokenize(inference_pb2.TokenizeRequest(text="x"))

    asyncio.run(main())


def test_what_has_no_token_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expanded = []
    monkeypatch.setattr(messages, "expand", lambda *given: expanded.append(1) or expand(*given))

    async def main() -> None:
        async with (
            running(tmp_path, tokens=BearerTokens(("secret",))) as server,
            undisturbed(server, "secret") as check,
        ):
            request = inference_pb2.TokenizeRequest(text=TEXT)
            found = await failure(server.inference.Tokenize(request, compression=GZIP))
            assert found == ("UNAUTHENTICATED", "NO_VALID_TOKEN") and not expanded
            await check()
            metadata = [("authorization", "Bearer secret")]
            await server.inference.Tokenize(request, compression=GZIP, metadata=metadata)
            assert expanded

    asyncio.run(main())


def test_the_bytes_of_all_messages_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, limits=Limits(max_input_bytes=20_000)) as server:
            bias = dict.fromkeys(range(256), 0.5)
            sampling = common_pb2.SamplingParams(
                max_tokens=3, logit_bias=bias, stop=["x" * 200] * 16
            )
            request = inference_pb2.GenerateRequest(text="x", sampling=sampling)
            with server.holding():
                running_call = asyncio.ensure_future(server.inference.Generate(request))
                await until(lambda: held(server) > 0)
                for compression in (None, GZIP):
                    large = inference_pb2.TokenizeRequest(text="x" * 17_000)
                    call = server.inference.Tokenize(large, compression=compression)
                    assert await failure(call) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
                    assert int(dict(await call.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
            await running_call
            assert held(server) == 0
            assert await server.inference.Tokenize(large)

    asyncio.run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff",
        gzip.compress(b"\xff" * 999, mtime=0),
        gzip.compress(bytes(999), mtime=0)[:-1],
        b"\x1f\x8b",
    ],
    ids=["plain", "compressed", "cut off", "shorter than its head"],
)
def test_what_is_no_message(tmp_path: Path, data: bytes) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            found = await failure(server.channel.unary_unary(METHOD)(data))
            assert found == ("INVALID_ARGUMENT", "INVALID_MESSAGE")

    asyncio.run(main())


@given(st.binary(max_size=200))
def test_plain_messages_that_look_like_compressed_ones(rest: bytes) -> None:
    data = b"\x78\x9c" + rest
    assert is_compressed(data) and expand(data, 1000) == data


@given(st.binary(max_size=2000))
def test_expansion_is_the_inverse_of_compression(data: bytes) -> None:
    for compressed in (gzip.compress(data), zlib.compress(data)):
        assert is_compressed(compressed) and expand(compressed, 2000) == data
        if data:
            with pytest.raises(MessageTooLargeError):
                expand(compressed, len(data) - 1)


def test_what_follows_a_compressed_message_is_not_lost() -> None:
    for more in (b"x", gzip.compress(b"more")):
        with pytest.raises(MessageError):
            expand(gzip.compress(b"message") + more, 1000)
        plain = zlib.compress(b"message") + more
        assert expand(plain, 1000) == plain


@pytest.mark.parametrize("window", range(9, 16))
def test_every_window_of_zlib_is_known(window: int) -> None:
    compressor = zlib.compressobj(wbits=window)
    data = compressor.compress(b"message" * 9) + compressor.flush()
    assert is_compressed(data) and expand(data, 1000) == b"message" * 9


def test_services_without_a_token_take_small_messages(tmp_path: Path) -> None:
    """Watches of the health service last as long as their clients like."""

    async def main() -> None:
        async with running(tmp_path, tokens=BearerTokens(("secret",))) as server:
            health = health_pb2_grpc.HealthStub(server.channel)
            for compression in (None, GZIP):
                for method in (health.Check, health.Watch):
                    large = health_pb2.HealthCheckRequest(service="x" * 5000)
                    call = method(large, compression=compression)
                    call = call if method == health.Check else call.read()
                    assert (await failure(call))[1] == "REQUEST_TOO_LARGE"
            small = health_pb2.HealthCheckRequest(service="x" * 4000)
            watch = health.Watch(small, compression=GZIP)
            assert await watch.read() and held(server) == 0
            watch.cancel()

    asyncio.run(main())


def test_small_messages_are_read_when_there_is_no_room(tmp_path: Path) -> None:
    """Such as an Abort, which makes room."""

    async def main() -> None:
        async with running(tmp_path, limits=Limits(max_input_bytes=10_000)) as server:
            with server.process.listeners._inputs.holding() as everything:
                everything.add(10_000)
                await server.inference.Tokenize(inference_pb2.TokenizeRequest(text="x"))

    asyncio.run(main())


def test_messages_that_wait_to_be_expanded_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(messages, "expand", lambda *given: go_on.wait() and expand(*given))
    data = gzip.compress(random.Random(0).randbytes(10_000), mtime=0)

    async def main() -> None:
        async with running(tmp_path, limits=Limits(max_input_bytes=25_000)) as server:
            call = server.channel.unary_unary(METHOD)
            waiting = [asyncio.ensure_future(call(data)) for _ in range(2)]
            await until(lambda: held(server) == 2 * len(data))
            assert await failure(call(data)) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
            go_on.set()
            await asyncio.gather(*waiting, return_exceptions=True)
            await until(lambda: held(server) == 0)

    asyncio.run(main())


def test_more_messages_than_may_wait_to_be_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have waited leave their places: in the second round as many wait as in the first.

    Each is larger than what is small enough not to be counted.
    """
    go_on = threading.Event()
    monkeypatch.setattr(messages, "expand", lambda *given: go_on.wait() and expand(*given))
    request = inference_pb2.TokenizeRequest(text=random.Random(0).randbytes(10_000).hex())
    data = gzip.compress(request.SerializeToString(), mtime=0)

    async def main() -> None:
        async with running(tmp_path, max_context=2**15) as server, undisturbed(server) as check:
            expected = (await server.inference.Tokenize(request)).SerializeToString()
            call = server.channel.unary_unary(METHOD)
            for _ in range(2):
                go_on.clear()
                waiting = [asyncio.ensure_future(call(data)) for _ in range(MAX_WAITING)]
                try:
                    await until(lambda: held(server) == MAX_WAITING * len(data))
                    late = call(data, timeout=60)
                    assert await failure(late) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
                    hint = dict(await late.trailing_metadata())["grpc-retry-pushback-ms"]
                    assert int(hint) == 1000 * RETRY_SECONDS
                    await check()
                finally:
                    go_on.set()
                assert await asyncio.gather(*waiting) == [expected] * MAX_WAITING

    asyncio.run(main())


def test_a_message_that_is_refused_is_let_go(tmp_path: Path) -> None:
    """gRPC keeps the error of a call in a cycle of references."""

    async def main() -> None:
        async with running(tmp_path) as server:
            gc.collect()
            gc.disable()
            try:
                data = inference_pb2.TokenizeRequest(text="x" * 9 * 2**20).SerializeToString()
                for _ in range(5):
                    await failure(server.channel.unary_unary(METHOD)(data))
                left = [m for m in gc.get_objects() if isinstance(m, inference_pb2.TokenizeRequest)]
                assert sum(len(message.text) > 2**20 for message in left) <= 1
            finally:
                gc.enable()

    asyncio.run(main())
