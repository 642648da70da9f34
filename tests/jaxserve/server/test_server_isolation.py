"""Requests beside a misbehaving client take no more engine steps than alone.

Steps are counted, not timed.
"""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio

from jaxserve.server.core.limits import Limits
from jaxserve.v1 import common_pb2, inference_pb2
from jaxserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.jaxserve.server.harness import Running, running

MEBI = 2**20
TOKENS = 40
LIMITS = Limits(max_unread_tokens=64, slow_client_seconds=600, max_message_bytes=32 * MEBI)
Trouble = Callable[[Running], Awaitable[None]]


async def canary(server: Running, token: str | None = None) -> tuple[int, bytes]:
    """Return the engine steps of a request, and its answer without timings."""
    before = server.runner.launches["canary"]
    sampling = common_pb2.SamplingParams(max_tokens=TOKENS, seed=3, ignore_eos=True)
    response = await server.inference.Generate(
        inference_pb2.GenerateRequest(text="canary", sampling=sampling, request_id="canary"),
        metadata=[("authorization", f"Bearer {token}")] if token else None,
    )
    steps = server.runner.launches["canary"] - before
    for choice in response.choices:
        choice.finish.ClearField("timings")
    response.usage.ClearField("cached_prompt_tokens")
    return steps, response.SerializeToString(deterministic=True)


def stream_request(tokens: int) -> inference_pb2.GenerateStreamRequest:
    sampling = common_pb2.SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True, logprobs=0)
    return inference_pb2.GenerateStreamRequest(text="x", sampling=sampling)


async def stopped_reader(server: Running) -> None:
    """Open streams and never read them; events pile up in outboxes, within their bound."""
    calls = [server.inference.GenerateStream(stream_request(400)) for _ in range(4)]
    await calls[0].read()
    await asyncio.sleep(0.3)
    for answer in server.service._answers.values():
        assert answer._outbox._unread <= LIMITS.max_unread_tokens
    for call in calls:
        call.cancel()


async def resets(server: Running) -> None:
    for _ in range(200):
        call = server.inference.GenerateStream(stream_request(400))
        await asyncio.sleep(0)
        call.cancel()


async def invalid_flood(server: Running) -> None:
    bad = inference_pb2.GenerateRequest(text="x", sampling=common_pb2.SamplingParams(temperature=9))
    await asyncio.gather(
        *(server.inference.Generate(bad) for _ in range(200)), return_exceptions=True
    )


async def too_large(server: Running) -> None:
    request = inference_pb2.GenerateRequest(text="x" * (40 * MEBI))
    for _ in range(3):
        with pytest.raises(aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
            await server.inference.Generate(request)


async def garbage(server: Running) -> None:
    host, port = server.address.split(":")
    for data in (
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        await writer.drain()
        await asyncio.wait_for(reader.read(), 60)  # the server hangs up
        writer.close()
    method = server.channel.unary_unary("/jaxserve.v1.InferenceService/Generate")
    with pytest.raises(aio.AioRpcError):
        await method(b"\xff\xff\xff")


async def half_open_connections(server: Running) -> None:
    host, port = server.address.split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(50)]
    await asyncio.sleep(0.05)
    for each in sockets:
        each.close()


@asynccontextmanager
async def while_(trouble: Trouble, server: Running) -> AsyncIterator[None]:
    task = asyncio.create_task(trouble(server))
    await asyncio.sleep(0.02)
    yield
    await task


TROUBLES = (
    pytest.param(stopped_reader, marks=pytest.mark.system),
    resets,
    invalid_flood,
    too_large,
    garbage,
    pytest.param(half_open_connections, marks=pytest.mark.system),
)


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_others_do_not_feel(tmp_path: Path, trouble: Trouble) -> None:
    async def main() -> None:
        async with running(
            tmp_path, limits=LIMITS, seconds=0.002, max_batch=8, prefix_cache=False
        ) as server:
            alone = await canary(server)
            await server.at_rest()
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            async with while_(trouble, server):
                beside = [await canary(server) for _ in range(3)]
            assert beside == [alone] * 3
            await server.at_rest()
            limit = 50 * 1024 + (
                3 * 40 * 1024 if trouble is too_large else 0
            )  # the client's own messages
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < limit

    asyncio.run(main())


def test_a_stopped_reader_is_told_so_in_the_end(tmp_path: Path) -> None:
    """A stream with too many unread tokens ends with RESOURCE_EXHAUSTED, long before its limit."""
    narrow = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1024),
        ("grpc.use_local_subchannel_pool", 1),
    ]

    async def main() -> None:
        async with (
            running(
                tmp_path, limits=LIMITS, max_batch=16, max_context=30_000, windows=(32,)
            ) as server,
            aio.insecure_channel(server.address, options=narrow) as channel,
        ):
            sampling = common_pb2.SamplingParams(
                max_tokens=20_000, logprobs=0, ignore_eos=True, n=16
            )
            request = inference_pb2.GenerateStreamRequest(text="x", sampling=sampling)
            call = InferenceServiceStub(channel).GenerateStream(request)
            await call.read()
            while server.service.in_flight:
                await asyncio.sleep(0.01)
            assert server.runner.steps < 10_000
            with pytest.raises(aio.AioRpcError) as caught:
                while await call.read() is not aio.EOF:
                    pass
            assert caught.value.code().name == "RESOURCE_EXHAUSTED"
            await server.at_rest()

    asyncio.run(main())
