"""A server in a process of its own, which a test kills.

    python -m tests.jaxserve.cluster.transfer.peer sender | receiver PORT

sender: offers three large pieces, and prints its port in a line.
receiver PORT: holds the first piece that it gets, and prints "piece".
Both of them stay.
"""

import asyncio
import sys
from contextlib import aclosing

from grpc import aio

from jaxserve.cluster.transfer.byte_budget import ByteBudget
from tests.jaxserve.cluster.transfer.harness import (
    MEBI,
    SECONDS,
    client_of,
    large_segment,
    now,
    prompt_of,
    servers,
)


async def send() -> None:
    async with servers(*[large_segment(40 * MEBI)] * 3, buffer=200 * MEBI) as s:
        print(s.port, flush=True)
        await asyncio.Event().wait()


async def receive(port: int) -> None:
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        client = client_of(channel, ByteBudget(400 * MEBI))
        async with aclosing(client.segments(prompt_of((1,)), now() + SECONDS)) as pieces:
            async for _ in pieces:
                print("piece", flush=True)
                await asyncio.Event().wait()


async def main(what: str, port: str = "") -> None:
    await (receive(int(port)) if what == "receiver" else send())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
