"""A server of our own for as long as it is measured: python -m jaxserve.serve in a process that
always ends.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from tempfile import TemporaryFile
from typing import IO

from jaxserve.client import AsyncClient
from jaxserve.errors import ConfigError

HOST = "127.0.0.1"
END_SECONDS = 10  # for a server that was told to end


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened on a moment ago."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def serve_command(port: int, http_port: int, flags: Sequence[str]) -> list[str]:
    """flags: more of serve's own."""
    addresses = [
        "--host",
        HOST,
        "--port",
        str(port),
        "--http-port",
        str(http_port),
        "--drain-timeout",
        "1",
    ]
    return [sys.executable, "-m", "jaxserve.serve", *addresses, *flags]


@asynccontextmanager
async def running(
    command: Sequence[str], address: str, ready_seconds: float
) -> AsyncIterator[None]:
    """Until the block ends, however that is; the block begins when gRPC's health check at `address`
    says ready.

    In a session of its own, so that Ctrl-C at a terminal reaches the generator alone. ConfigError
    when the server ends before it is ready, with its last words, or does not become ready in time.
    """
    with TemporaryFile() as words:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            start_new_session=True,
        )
        try:
            await _until_ready(process, address, ready_seconds, words)
            yield
        finally:
            await _end(process)


async def _until_ready(
    process: asyncio.subprocess.Process, address: str, ready_seconds: float, words: IO[bytes]
) -> None:
    async with AsyncClient(address) as client:
        ready = asyncio.create_task(client.wait_ready(ready_seconds))
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise ConfigError(
                    f"the server ended with exit code {ended.result()}: {last_line(words)}"
                )
            await ready
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)


def last_line(words: IO[bytes]) -> str:
    size = words.seek(0, os.SEEK_END)
    words.seek(max(0, size - 4096))
    lines = words.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it said nothing"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Asked first, then killed; a second interruption kills at once."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
