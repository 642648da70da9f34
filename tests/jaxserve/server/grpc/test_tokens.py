"""Tokens are asked for by every method of every service, before a message is read.

Open on purpose are Check and Watch of grpc.health.v1 alone, whose probes have no token.
"""

import asyncio
from collections.abc import Collection, Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc import aio  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from jaxserve.server.grpc.reflection import SERVICES
from jaxserve.server.grpc.server import ADMIN, HEALTH, INFERENCE
from jaxserve.server.grpc.vllm import NAME as VLLM
from jaxserve.server.readiness import Phase
from jaxserve.server.security.auth import BearerTokens
from tests.jaxserve.server.grpc.undisturbed import undisturbed
from tests.jaxserve.server.grpc.vllm_harness import serving
from tests.jaxserve.server.harness import Running

TOKENS = BearerTokens(("c-token",), admin="a-token")
CLIENT = [("authorization", "Bearer c-token")]
NOBODYS = (
    "/grpc.channelz.v1.Channelz/GetServers",
    "/jaxserve.v1.InferenceService/Nothing",
    "/jaxserve.v1.AdminService/Nothing",
    "/jaxserve.v1.NothingService/Nothing",
)


async def services(channel: aio.Channel) -> set[str]:
    """Return the names of the services of a port, as its reflection tells a client."""
    method = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    call = method(iter([asked]), metadata=CLIENT, timeout=60)
    (answer,) = [answer async for answer in call]
    return {service.name for service in answer.list_services_response.service}


def methods(names: Iterable[str]) -> list[str]:
    """Return the paths of all methods of these services, as their descriptors have them."""
    pool = descriptor_pool.Default()
    return [
        f"/{name}/{method.name}"
        for name in sorted(names)
        for method in pool.FindServiceByName(name).methods
    ]


async def refusals(
    channel: aio.Channel, paths: Collection[str], metadata: list[tuple[str, str]] | None = None
) -> dict[str, str]:
    """Return the status of a call of each method, which sends no message."""

    async def refusal(path: str) -> str:
        call = channel.stream_stream(path)(metadata=metadata, timeout=60)
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        return caught.value.code().name

    found = await asyncio.gather(*map(refusal, paths))
    return dict(zip(paths, found, strict=True))


async def channels(server: Running, stack: AsyncExitStack) -> dict[str, aio.Channel]:
    """Return a channel to each port of gRPC, by the port's name."""
    ports = server.process.listeners.ports
    return {
        name: await stack.enter_async_context(aio.insecure_channel(f"127.0.0.1:{port}"))
        for name, port in ports.items()
    }


@pytest.mark.parametrize("admin_port", [None, 0], ids=["one port", "admin port"])
def test_every_method_asks_for_a_token(tmp_path: Path, admin_port: int | None) -> None:
    served = {INFERENCE, ADMIN, VLLM, HEALTH, *SERVICES}

    async def main() -> None:
        async with (
            serving(tmp_path, tokens=TOKENS, admin_port=admin_port) as (server, _),
            undisturbed(server, "c-token") as check,
            AsyncExitStack() as stack,
        ):
            ports = await channels(server, stack)
            assert set.union(*[await services(channel) for channel in ports.values()]) == served
            paths = [*methods(served - {HEALTH}), *NOBODYS]
            for channel in ports.values():
                for metadata in (None, [("authorization", "Bearer wrong")]):
                    found = await refusals(channel, paths, metadata)
                    assert found == dict.fromkeys(paths, "UNAUTHENTICATED")
                await check()

    asyncio.run(main())


@pytest.mark.parametrize("admin_port", [None, 0], ids=["one port", "admin port"])
def test_health_checks_need_no_token(tmp_path: Path, admin_port: int | None) -> None:
    small = health_pb2.HealthCheckRequest()

    async def main() -> None:
        async with (
            serving(tmp_path, tokens=TOKENS, admin_port=admin_port) as (server, _),
            undisturbed(server, "c-token"),
            AsyncExitStack() as stack,
        ):
            for channel in (await channels(server, stack)).values():
                health = health_pb2_grpc.HealthStub(channel)
                assert await health.Check(small)
                watch = health.Watch(small)
                assert await watch.read()
                watch.cancel()
                (other,) = (await refusals(channel, [f"/{HEALTH}/Nothing"])).values()
                assert other == "UNIMPLEMENTED"

    asyncio.run(main())


@pytest.mark.parametrize("admin_port", [None, 0], ids=["one port", "admin port"])
def test_a_client_is_no_administrator(tmp_path: Path, admin_port: int | None) -> None:
    """The calls send what the methods take: nothing of it is done."""
    drained: list[str] = []

    async def main() -> None:
        async with (
            serving(tmp_path, tokens=TOKENS, admin_port=admin_port) as (server, _),
            undisturbed(server, "c-token") as check,
            AsyncExitStack() as stack,
        ):
            server.drain = lambda: drained.append("drained")
            paths = methods([ADMIN])
            for channel in (await channels(server, stack)).values():
                for path in paths:
                    call = channel.unary_unary(path)(b"", metadata=CLIENT, timeout=60)
                    assert await call.code() is grpc.StatusCode.PERMISSION_DENIED, path
                await check()
            assert f"/{ADMIN}/Drain" in paths and not drained
            assert server.readiness.phase is Phase.READY

    asyncio.run(main())
