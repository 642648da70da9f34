"""HTTP by hand: bytes that no client library would send, and a look at what they leave behind."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from tests.jaxserve.server.harness import open_files, until
from tests.jaxserve.server.http.harness import Http

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
BODY = b'{"prompt": "x", "max_tokens": 2}'
FEW = 3  # tasks and descriptors of the connections of the tests' own client
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def undisturbed(http: Http) -> AsyncIterator[bytes]:
    """Check that a block changes no other answer, and leaves nothing behind.

    That is no request, page, connection, task or descriptor.

    Yields what `http.canary` has to answer meanwhile.
    """
    canary = await http.canary()
    await http.server.at_rest()
    connections = len(http.open_connections)
    tasks = len(asyncio.all_tasks())
    files = open_files()
    yield canary
    assert await http.canary() == canary
    await http.server.at_rest()
    await until(lambda: len(http.open_connections) == connections)
    await until(lambda: not http.uvicorn.server_state.tasks)
    await until(lambda: len(asyncio.all_tasks()) <= tasks + FEW)
    await until(lambda: open_files() <= files + FEW)


def launched(http: Http) -> set[str]:
    """Return the ids of requests that the device has seen, without the canary's."""
    return http.server.runner.launches.keys() - {"canary"}


@asynccontextmanager
async def connected(http: Http) -> AsyncIterator[Stream]:
    """Connect; the connection is reset at the end, whatever is still to be sent."""
    address = httpx.URL(http.base)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_to(http: Http, *sent: bytes) -> bytes:
    """Send the parts, and return all that comes until the server closes the connection."""
    async with connected(http) as (reader, writer):
        for part in sent:
            writer.write(part)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        return await all_of(reader)


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """Return all that comes until the server closes or resets the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(2**16):
            found += part
    return found


def problem(answer: bytes) -> tuple[int, str]:
    """Return status and code of an error that ends its connection."""
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head and b"content-type: application/json" in head, answer
    return int(head.split()[1]), json.loads(content)["error"]["code"]


def statuses(answers: bytes) -> list[int]:
    """Return the status of each answer on a connection."""
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]
