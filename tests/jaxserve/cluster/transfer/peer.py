"""A server of its own process, to be killed: python -m tests.jaxserve.cluster.transfer.peer grpc|jax WHAT

sender: of three large pieces; dtypes: of PIECES. They say their port in a line.
receiver PORT: holds the first piece that it gets, and says "piece"; stopping PORT: by jax, stops in the midst of it.
All of them stay.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable
from contextlib import aclosing
from typing import Any

from grpc import aio

from jaxserve.cluster.transfer.byte_budget import Budget
from jaxserve.engine.kv_segment import Piece
from tests.jaxserve.cluster.transfer.harness import (
    MEBI,
    PIECES,
    GrpcWay,
    JaxWay,
    Way,
    asking_for,
    client_of,
    large,
    now,
    servers,
)


async def send(way: Way, *pieces: Piece) -> None:
    async with servers(*pieces, buffer=200 * MEBI, way=way) as s:
        print(s.port, flush=True)
        await asyncio.Event().wait()


async def receive(way: Way, port: int) -> None:
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        client = client_of(way, channel, Budget(400 * MEBI))
        async with aclosing(client.pieces(asking_for((1,)), now() + 60)) as pieces:
            async for _ in pieces:
                print("piece", flush=True)
                await asyncio.Event().wait()


def stopping() -> Way:
    way = JaxWay()
    pull = way.here.pull

    def pull_and_stop(*args: Any) -> Awaitable[Any]:
        asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGSTOP)
        return pull(*args)

    way.here.pull = pull_and_stop  # type: ignore[method-assign]
    return way


async def main(transport: str, what: str, port: str = "") -> None:
    way = JaxWay() if transport == "jax" else GrpcWay()
    if what == "receiver":
        await receive(way, int(port))
    elif what == "stopping":
        await receive(stopping(), int(port))
    else:
        await send(way, *(PIECES if what == "dtypes" else [large(40 * MEBI)] * 3))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
