"""A server of its own process, to be killed: python -m tests.jaxserve.cluster.transfer.peer grpc | jax sender | receiver PORT.

A sender says its port in a line, a receiver "piece" for each one that it holds; both stay.
"""

import asyncio
import sys
from contextlib import aclosing

from grpc import aio

from jaxserve.cluster.transfer.budget import Budget
from jaxserve.cluster.transfer.prefill import Prompt
from tests.jaxserve.cluster.transfer.harness import MEBI, GrpcWay, JaxWay, Way, client_of, large, now, servers


async def send(way: Way) -> None:
    async with servers(large(40 * MEBI), large(40 * MEBI), large(40 * MEBI), buffer=200 * MEBI, way=way) as s:
        print(s.port, flush=True)
        await asyncio.Event().wait()


async def receive(way: Way, port: int) -> None:
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        client = client_of(way, channel, Budget(200 * MEBI))
        async with aclosing(client.pieces(Prompt((1,)), now() + 60)) as pieces:
            async for _ in pieces:
                print("piece", flush=True)
                await asyncio.Event().wait()


if __name__ == "__main__":
    way = JaxWay() if sys.argv[1] == "jax" else GrpcWay()
    asyncio.run(send(way) if sys.argv[2] == "sender" else receive(way, int(sys.argv[3])))
