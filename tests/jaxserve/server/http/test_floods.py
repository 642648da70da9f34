"""Clients that send too much, ask too much or take nothing, while others are answered."""

import asyncio
import contextlib
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from jaxserve.server.core.limits import Limits
from jaxserve.server.http.connection import MAX_PIPELINED, Connection
from jaxserve.server.http.open_connections import LONGEST_PERIOD
from jaxserve.v1 import inference_pb2
from tests.jaxserve.server.harness import until
from tests.jaxserve.server.http.harness import FakeMetrics, Http, serving
from tests.jaxserve.server.http.raw_sockets import (
    CHUNKED,
    GET,
    LAST,
    all_of,
    answer_to,
    connected,
    problem,
    statuses,
    undisturbed,
)

BLOCK = b"1\r\n \r\n" * 10_000
MOST_BLOCKS = 2000  # 114 MiB
BODY_LIMIT = 2**20
READ = 2**18  # bytes that an event loop takes at once
# Until an answer, headers and twice the body; then a body once more. Each is found out by a read.
MOST_TAKEN = Limits().max_header_bytes + 3 * BODY_LIMIT + 2 * READ


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[Connection]:
    """Count the bytes that the server takes, by connection."""
    counts = Counter[Connection]()
    receive = Connection.data_received

    def counted(self: Connection, data: bytes) -> None:
        counts[self] += len(data)
        receive(self, data)

    monkeypatch.setattr(Connection, "data_received", counted)
    return counts


async def flood(writer: asyncio.StreamWriter) -> int:
    """Write blocks of chunks until the connection is reset, and return their number."""
    blocks = 0
    with contextlib.suppress(ConnectionError):
        while blocks < MOST_BLOCKS:
            writer.write(BLOCK)
            await writer.drain()
            blocks += 1
    return blocks


async def check_others(http: Http, canary: bytes, token: str | None) -> None:
    """Check that clients of both protocols are answered."""
    assert await http.canary() == canary
    metadata = [("authorization", f"Bearer {token}")] if token else None
    request = inference_pb2.TokenizeRequest(text="x")
    response = await http.server.inference.Tokenize(request, metadata=metadata)
    assert list(response.token_ids) == [256, ord("x")]


@pytest.mark.parametrize(
    ("token", "wanted"),
    [("secret", (401, "invalid_api_key")), (None, (413, "request_too_large"))],
)
def test_chunks_of_one_byte_after_a_refusal(
    tmp_path: Path, token: str | None, wanted: tuple[int, str], taken: Counter[Connection]
) -> None:
    """The parser has work with each chunk: a client that is answered gets little of it."""
    limits = Limits(max_body_bytes=BODY_LIMIT)

    async def main() -> None:
        async with (
            serving(tmp_path, token=token, limits=limits) as http,
            undisturbed(http) as canary,
            connected(http) as (reader, writer),
        ):
            writer.write(CHUNKED)
            answer = asyncio.create_task(all_of(reader))
            flooding = asyncio.create_task(flood(writer))
            while not flooding.done():
                await check_others(http, canary, token)
            assert problem(await answer) == wanted
            assert flooding.result() < MOST_BLOCKS, "the server reads on"
            assert max(taken.values()) <= MOST_TAKEN

    asyncio.run(main())


@pytest.mark.system
def test_many_bad_requests_are_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line at most in each period, with their number."""
    caplog.set_level(logging.INFO)
    number = 300

    def counted() -> int:
        return sum(int(n) for n in re.findall(r"(\d+) INVALID_REQUEST", caplog.text))

    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            began = time.monotonic()
            for _ in range(number):
                answer = await answer_to(http, b"garbage\r\n\r\n")
                assert problem(answer) == (400, "invalid_request")
            await until(lambda: counted() == number)
            periods = (time.monotonic() - began) / LONGEST_PERIOD
            assert len(server_records(caplog.records)) <= 2 + periods

    asyncio.run(main())
    assert "uvicorn[standard]" not in caplog.text


def server_records(records: Sequence[logging.LogRecord]) -> list[logging.LogRecord]:
    return [record for record in records if record.name.startswith(("jaxserve", "uvicorn"))]


def test_one_header_of_megabytes(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            line = b"x-large: " + b"x" * 5_000_000
            answer = await answer_to(http, GET.replace(b"host:", line + b"\r\nhost:"))
            assert problem(answer) == (431, "headers_too_large")
            assert statuses(answer) == [431]

    asyncio.run(main())


def test_many_small_headers(tmp_path: Path) -> None:
    """Their bytes are bounded, not their number."""

    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            lines = b"".join(b"a%d: b\r\n" % number for number in range(1500))
            assert len(lines) < Limits().max_header_bytes
            answer = await answer_to(http, LAST.replace(b"host:", lines + b"host:"))
            assert statuses(answer) == [200]
            answer = await answer_to(http, LAST.replace(b"host:", lines * 2 + b"host:"))
            assert problem(answer) == (431, "headers_too_large")

    asyncio.run(main())


class LargeMetrics(FakeMetrics):
    """Metrics that do not fit into the kernel's buffers; counts how often they are asked for."""

    asked = 0

    async def text(self) -> bytes:
        self.asked += 1
        return bytes(2**23)


@pytest.mark.system
def test_many_answers_that_nobody_reads(tmp_path: Path) -> None:
    """The connection is closed; one answer was made to be sent after the first, and no others."""
    asked = GET.replace(b"/health", b"/metrics") * (1 + MAX_PIPELINED)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        metrics = LargeMetrics(lambda: 0)
        limits = Limits(slow_client_seconds=0.2)
        async with (
            serving(tmp_path, metrics=metrics, limits=limits) as http,
            undisturbed(http) as canary,
        ):
            before = len(http.open_connections)
            with socket.socket() as client:
                client.setblocking(False)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                address = httpx.URL(http.base)
                await loop.sock_connect(client, (address.host, address.port))
                await loop.sock_sendall(client, asked)
                assert await loop.sock_recv(client, 12) == b"HTTP/1.1 200"
                assert await http.canary() == canary
                await until(lambda: len(http.open_connections) == before)
            assert metrics.asked <= 2

    asyncio.run(main())
