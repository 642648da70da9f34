"""A server of its own process, to be killed: python -m tests.jaxserve.cluster.transfer.peer sender | receiver PORT.

A sender says its port in a line, a receiver "piece" for each one that it holds; both stay.
"""

import asyncio
import sys
from contextlib import aclosing

from grpc import aio

from jaxserve.cluster.transfer.budget import Budget
from jaxserve.cluster.transfer.grpc_transport import GrpcReceiver
from jaxserve.cluster.transfer.prefill import PrefillClient
from tests.jaxserve.cluster.transfer.harness import HANDSHAKE, MEBI, asking_for, large, now, servers


async def send() -> None:
    async with servers(large(40 * MEBI), large(40 * MEBI), large(40 * MEBI), buffer=200 * MEBI) as s:
        print(s.port, flush=True)
        await asyncio.Event().wait()


async def receive(port: int) -> None:
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        client = PrefillClient(channel, GrpcReceiver(channel, Budget(200 * MEBI)), HANDSHAKE)
        async with aclosing(client.pieces(asking_for((1,)), now() + 60)) as pieces:
            async for _ in pieces:
                print("piece", flush=True)
                await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(send() if sys.argv[1] == "sender" else receive(int(sys.argv[2])))
