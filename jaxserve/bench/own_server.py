"""A jaxserve server for the time of a benchmark, in a process that always ends."""

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
END_SECONDS = 10  # that a server gets to end after SIGTERM


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def serve_command(port: int, http_port: int, flags: Sequence[str]) -> list[str]:
    """Return the command that starts a server, with more flags of its own.

    It is ready when nothing is left to compile, unless these flags say otherwise.
    """
    addresses = ["--host", HOST, "--port", str(port), "--http-port", str(http_port)]
    common = [*addresses, "--drain-timeout", "1", "--ready-when", "all"]
    return [sys.executable, "-m", "jaxserve.serve", *common, *flags]


@asynccontextmanager
async def running(
    command: Sequence[str], address: str, ready_seconds: float
) -> AsyncIterator[None]:
    """Run a server for the time of a block, which begins when the server is ready.

    Args:
        address: Address of the server's gRPC.

    Raises:
        ConfigError: The server ended before it was ready; the error has its last line.
        CallError: The server is not ready in time.
    """
    with TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C at a terminal reaches the load generator alone
        )
        try:
            await _until_ready(process, address, ready_seconds, log)
            yield
        finally:
            await _end(process)


async def _until_ready(
    process: asyncio.subprocess.Process, address: str, ready_seconds: float, log: IO[bytes]
) -> None:
    async with AsyncClient(address) as client:
        ready = asyncio.create_task(client.wait_ready(ready_seconds))
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise ConfigError(
                    f"the server ended with exit code {ended.result()}: {last_line(log)}"
                )
            await ready
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)


def last_line(log: IO[bytes]) -> str:
    """Return the last line that a process wrote, without "error: "."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 4096))
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it said nothing"


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask a process to end, and kill it if it does not; a second Ctrl-C kills it at once."""
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
