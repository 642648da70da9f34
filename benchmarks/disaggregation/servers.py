"""The two servers of each arrangement, one on each core, and the caller that deals requests out."""

import argparse
import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from grpc import aio  # type: ignore[attr-defined]

from benchmarks.disaggregation.handovers import Counts, read_counts
from jaxserve.bench.caller import Caller
from jaxserve.bench.grpc_caller import GrpcCaller
from jaxserve.bench.own_server import HOST, free_ports, running, serve_command

ARRANGEMENTS = ("disaggregated", "chunked", "neither")
READY_SECONDS = 1800.0
CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))


@dataclass(frozen=True)
class Servers:
    """Running servers; addresses: gRPC, called in turn; metrics: URL of the decode server's."""

    addresses: list[str]
    metrics: str | None

    async def counts(self) -> Counts:
        """Return the decode server's counts so far; none where there is no such server."""
        return await asyncio.to_thread(read_counts, self.metrics) if self.metrics else Counter()


def server_flags(
    arrangement: str, args: argparse.Namespace, context: int, first: str
) -> tuple[list[str], list[str]]:
    """Return the flags of the two servers; first: gRPC address of the first one."""
    tokens = context if arrangement == "neither" else args.step_tokens
    both = ["--model", str(args.model), "--step-tokens", str(tokens)]
    if arrangement != "disaggregated":
        return both, both
    threshold = ["--prefill-threshold", str(args.threshold)]
    decodes = ["--role", "decode", "--prefill-server", first, *threshold]
    return [*both, "--role", "prefill"], [*both, *decodes]


@asynccontextmanager
async def running_servers(
    arrangement: str, args: argparse.Namespace, context: int
) -> AsyncIterator[Servers]:
    """Run both servers, each on a core of its own, for the time of a block.

    The block begins when they are ready, and the decode server has found its prefill server.
    """
    ports = free_ports(4)
    grpc = ports[:2]
    http = ports[2:]
    addresses = [f"{HOST}:{port}" for port in grpc]
    flags = server_flags(arrangement, args, context, addresses[0])
    async with AsyncExitStack() as stack:
        for i, core in enumerate(args.server_cores):
            pinned = ["taskset", "--cpu-list", str(core)]
            command = [*pinned, *serve_command(grpc[i], http[i], flags[i])]
            await stack.enter_async_context(running(command, addresses[i], READY_SECONDS))
        if arrangement != "disaggregated":
            yield Servers(addresses, None)
            return
        servers = Servers(addresses[1:], f"http://{HOST}:{http[1]}/metrics")
        async with asyncio.timeout(READY_SECONDS):
            while not (await servers.counts())["prefill_servers", "ready"]:
                await asyncio.sleep(0.1)
        yield servers


@asynccontextmanager
async def connected_caller(addresses: Sequence[str]) -> AsyncIterator[Caller]:
    """Yield a caller that sends each request to the next of these addresses."""
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(aio.insecure_channel(a, options=CHANNEL))
            for a in addresses
        ]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        yield GrpcCaller(channels, None, ignore_eos=True)
