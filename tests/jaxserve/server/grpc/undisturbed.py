"""A check around trouble: others do not feel it, and it leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.jaxserve.server.harness import Running, open_files, until
from tests.jaxserve.server.test_server_isolation import canary

FEW = 20  # tasks and descriptors that gRPC itself opens and ends now and then
Check = Callable[[], Awaitable[None]]


@asynccontextmanager
async def undisturbed(server: Running, token: str | None = None) -> AsyncIterator[Check]:
    """Let trouble be made in the block, which may check a canary by what this yields.

    The canary takes the same steps and gets the same answer before the block, in it and after it.
    After it no request, page, byte of a message, task or connection is left.

    Args:
        token: Of the canary, if the server asks for one.
    """
    alone = await canary(server, token)
    await server.at_rest()
    tasks = len(asyncio.all_tasks())
    files = open_files()

    async def check() -> None:
        assert await canary(server, token) == alone

    yield check
    await server.at_rest()
    await until(lambda: held(server) == 0)
    await until(lambda: len(asyncio.all_tasks()) <= tasks + FEW)
    await until(lambda: open_files() <= files + FEW)
    await check()
    await server.at_rest()


def held(server: Running) -> int:
    """Return the bytes of messages that the server counts as received and not done with."""
    return server.process.listeners._inputs.held
