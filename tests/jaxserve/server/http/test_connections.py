"""What a client may hold of an HTTP server: connections, bytes on the wire, and time."""

import argparse
import asyncio
import contextlib
import json
import re
from pathlib import Path

import pytest

from jaxserve.addresses import host_names, page_origins
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.connection import MAX_PIPELINED
from jaxserve.server.http.open_connections import RESERVE
from tests.jaxserve.server.harness import until
from tests.jaxserve.server.http.harness import serving
from tests.jaxserve.server.http.raw_sockets import (
    BODY,
    CHUNKED,
    GET,
    POST,
    all_of,
    answer_to,
    connected,
    launched,
    problem,
    undisturbed,
)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/health"])
def test_the_body_of_an_answered_request_is_not_read_on(tmp_path: Path, path: bytes) -> None:
    async def main() -> None:
        async with serving(tmp_path, token="secret", limits=Limits(max_body_bytes=2**20)) as http:
            canary = await http.canary()
            async with connected(http) as (reader, writer):
                method = b"POST" if path == b"/v1/completions" else b"GET"
                head = b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000000000\r\n\r\n"
                writer.write(method + b" " + path + head)
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 401" if method == b"POST" else b"HTTP/1.1 200")
                assert b"connection: close" in answer
                sent = 0
                with contextlib.suppress(ConnectionError):
                    while sent < 2**30:
                        writer.write(bytes(2**20))
                        await writer.drain()
                        sent += 2**20
                assert sent < 2**26, "the server reads on"  # what buffers hold, and 1 MiB
            await until(lambda: len(http.open_connections) <= 1)
            assert await http.canary() == canary

    asyncio.run(main())


def test_a_refusal_reaches_a_client_that_sends_all_of_its_body_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            body = bytes(Limits().max_body_bytes + 2**20)
            head = POST + b"content-length: %d\r\n\r\n" % len(body)
            for _ in range(3):
                assert problem(await answer_to(http, head + body)) == (413, "request_too_large")

    asyncio.run(main())


def test_bytes_are_counted_as_they_come(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, limits=Limits(max_body_bytes=2**16)) as http:
            canary = await http.canary()
            answer = await answer_to(http, CHUNKED, *[b"1\r\n \r\n" * 1000] * 30)
            assert problem(answer) == (413, "request_too_large")
            assert b"the body came in at least" in answer

            extended = b"1;" + b"x" * 4000 + b"\r\n \r\n"
            answer = await answer_to(http, CHUNKED, *[extended * 10] * 8)
            assert problem(answer) == (413, "request_too_large")

            small = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
            last = CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
            fine = await answer_to(http, last, small)
            assert fine.startswith(b"HTTP/1.1 200")

            answer = await answer_to(
                http, b"GET / HTTP/1.1\r\n", *[b"a: " + b"x" * 5000 + b"\r\n"] * 4
            )
            assert problem(answer) == (431, "headers_too_large")
            assert await http.canary() == canary

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize(
    "sent, statuses",
    [
        (b"", []),
        (b"GET /health HTTP/1.1\r\n", [408]),
        (GET + b"GET /hea", [200, 408]),
        (POST + b"content-length: 1000\r\n\r\n{", [408]),
        (CHUNKED + b"FFF\r\n", [408]),
    ],
    ids=["nothing", "half a head", "half of a second head", "half a body", "half a chunk"],
)
def test_a_request_that_does_not_come(tmp_path: Path, sent: bytes, statuses: list[int]) -> None:
    """The connection is closed, also while its client sends a byte now and then; a complete
    request is answered, however long its client pauses before the next.
    """

    async def main() -> None:
        async with serving(tmp_path, limits=Limits(slow_client_seconds=0.3)) as http:
            http.uvicorn.config.timeout_keep_alive = 3600
            async with connected(http) as (reader, writer), connected(http) as patient:
                patient[1].write(GET)
                assert (await patient[0].readuntil(b"}")).startswith(b"HTTP/1.1 200")
                writer.write(sent)
                answer = asyncio.create_task(all_of(reader))
                while not answer.done():
                    await asyncio.sleep(0.05)
                    if sent and not answer.done():
                        writer.write(b"1")
                found = [int(part[:3]) for part in answer.result().split(b"HTTP/1.1 ")[1:]]
                assert found == statuses
                patient[1].write(GET)
                assert (await patient[0].readuntil(b"}")).startswith(b"HTTP/1.1 200")
        assert not http.open_connections

    asyncio.run(main())


@pytest.mark.system
def test_a_client_that_is_answered_and_sends_slowly(tmp_path: Path) -> None:
    """The time after the answer is short, and more bytes do not extend it."""

    async def main() -> None:
        async with (
            serving(tmp_path, token="secret") as http,
            connected(http) as (reader, writer),
        ):
            writer.write(POST + b"content-length: 8000000\r\n\r\n")
            answer = asyncio.create_task(all_of(reader))
            await until(lambda: http.open_connections)
            while http.open_connections:
                writer.write(b"x")
                await asyncio.sleep(0.1)
            assert (await answer).startswith(b"HTTP/1.1 401")

    asyncio.run(main())


def test_more_connections_than_the_server_takes(tmp_path: Path) -> None:
    """Clients that say nothing keep others out, and neither health checks nor refusals."""

    async def main() -> None:
        async with serving(tmp_path, limits=Limits(max_http_connections=4)) as http:
            canary = await http.canary()
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(2 * RESERVE):
                    await stack.enter_async_context(connected(http))
                await until(lambda: len(http.open_connections) == 4 + RESERVE)
                for _ in range(3):
                    health = await answer_to(http, GET)
                    assert health.startswith(b"HTTP/1.1 200") and b"connection: close" in health
                    answer = await answer_to(http, POST + b"content-length: 0\r\n\r\n")
                    assert problem(answer) == (503, "too_many_connections")
                    assert b"retry-after: 1\r\n" in answer and b"x-should-retry: true" in answer
                assert await http.canary() == canary  # on a connection of those before
            await until(lambda: len(http.open_connections) <= 1)
            assert await answer_to(http, GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))

    asyncio.run(main())


@pytest.mark.parametrize("headers", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n"])
def test_requests_that_do_not_wait_for_answers(
    tmp_path: Path, headers: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            answer = await answer_to(http, GET.replace(b"host:", headers + b"host:") * 1000)
            assert answer.count(b"HTTP/1.1 200") == 1 + MAX_PIPELINED
            assert answer.count(b"connection: close") == 1
            assert await http.canary()

    asyncio.run(main())
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.system
def test_what_came_before_a_bad_request_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, limits=Limits(slow_client_seconds=1.0)) as http:
            whole = POST + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
            answer = await answer_to(http, GET + whole + GET + b"garbage\r\n\r\n")
            assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1") == 3
            half = POST + b"content-length: 1000\r\n\r\n"
            answer = await answer_to(http, whole + half + b"{" * 10, b"", half)
            assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 2

    asyncio.run(main())


def test_a_client_that_goes_ends_all_of_its_requests(tmp_path: Path) -> None:
    """Also the one that runs while another waits behind it."""

    async def main() -> None:
        async with serving(tmp_path, seconds=0.01) as http:
            long = b'{"prompt": "x", "max_tokens": 400, "ignore_eos": true}'
            async with connected(http) as (_, writer):
                writer.write(POST + b"content-length: %d\r\n\r\n%s" % (len(long), long) + GET)
                await until(lambda: http.server.runner.launches)
            await http.server.at_rest()
            assert max(http.server.runner.launches.values()) < 300

    asyncio.run(main())


def test_a_client_that_sends_no_more_after_a_question(tmp_path: Path) -> None:
    """What is answered at once reaches a client that has shut its own side down."""

    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            for sent, start in ((GET, b"HTTP/1.1 200"), (GET[:20], b""), (b"", b"")):
                async with connected(http) as (reader, writer):
                    writer.write(sent)
                    writer.write_eof()
                    answer = await all_of(reader)
                    assert answer.startswith(start) and (start or not answer), sent

    asyncio.run(main())


def test_a_client_that_sends_no_more_before_its_answer_has_gone(tmp_path: Path) -> None:
    """The request ends, as that of a client that closes both sides."""

    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            long = b'{"prompt": "x", "max_tokens": 400, "ignore_eos": true, "request_id": "long"}'
            with http.server.holding():
                async with connected(http) as (reader, writer):
                    writer.write(POST + b"content-length: %d\r\n\r\n%s" % (len(long), long))
                    await until(lambda: http.server.service.in_flight)
                    writer.write_eof()
                    assert await all_of(reader) == b""
                await until(lambda: not http.uvicorn.server_state.tasks)
            await http.server.at_rest()
            assert http.server.runner.launches["long"] < 20

    asyncio.run(main())


def test_headers_behind_a_body_are_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, token="secret") as http:
            chunk = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
            trailers = b"authorization: Bearer secret\r\nconnection: close\r\n\r\n"
            answer = await answer_to(http, CHUNKED + chunk + trailers)
            assert problem(answer) == (401, "invalid_api_key")

    asyncio.run(main())


@pytest.mark.system
def test_bytes_that_are_no_request_keep_no_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            serving(tmp_path, limits=Limits(keep_alive_seconds=0.5)) as http,
            connected(http) as (reader, writer),
        ):
            writer.write(GET)
            await reader.readuntil(b"}")
            writer.write(b"\r\n")
            assert await all_of(reader) == b""

    asyncio.run(main())


@pytest.mark.system
def test_the_time_of_a_request_begins_with_its_first_byte(tmp_path: Path) -> None:
    """Browsers connect before they have anything to ask."""

    async def main() -> None:
        async with (
            serving(tmp_path, limits=Limits(slow_client_seconds=3)) as http,
            connected(http) as (reader, writer),
        ):
            await asyncio.sleep(2)
            writer.write(GET[:-2])
            await asyncio.sleep(2)
            writer.write(GET[-2:])
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")

    asyncio.run(main())


@pytest.mark.system
def test_a_slow_reader_keeps_its_answer(tmp_path: Path) -> None:
    """The kernels of both sides hold megabytes, and let them go in bursts."""

    async def main() -> None:
        limits = Limits(max_body_bytes=2**25, max_prompt_bytes=2**25)
        async with serving(tmp_path, limits=limits) as http:
            body = json.dumps({"tokens": [65] * 6_000_000}).encode()
            async with connected(http) as (reader, writer):
                head = POST.replace(b"/v1/completions", b"/detokenize")
                writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                await reader.readuntil(b"\r\n\r\n")
                object.__setattr__(limits, "slow_client_seconds", 3.0)
                taken = 0
                for _ in range(20):
                    await asyncio.sleep(0.4)
                    taken += len(await reader.readexactly(2**17))
                object.__setattr__(limits, "slow_client_seconds", 30.0)
                await reader.readexactly(6_000_000 - taken)

    asyncio.run(main())


@pytest.mark.parametrize(
    "lines",
    [
        b"content-length: 2\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ncontent-length: 2",
        b"content-length: 2\r\ncontent-length: 3",
        b"content-length: +2",
        b"content-length: 0x2",
        b"content-length: 2 2",
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: identity",
        b"transfer-encoding: xchunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        b"a : b",
        b"a: b\r\n c: d",
        b"a: b\x00",
        b"a: b\rc",
        b"host: localhost",
    ],
)
def test_heads_that_servers_read_in_different_ways(tmp_path: Path, lines: bytes) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + lines
            # What follows the head is no request of its own.
            answer = await answer_to(http, head + b"\r\nconnection: close\r\n\r\n0\r\n\r\n" + GET)
            assert problem(answer) == (400, "invalid_request")
            assert answer.count(b"HTTP/1.1 ") == 1
            assert not launched(http)

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET http://localhost HTTP/1.1\r\nhost: localhost\r\n\r\n",  # no path
        b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        bytes.fromhex("1603010200010001fc0303"),  # TLS
        CHUNKED + b"x\r\n",
    ],
)
def test_what_is_no_request(tmp_path: Path, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            sent_last = sent.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
            assert problem(await answer_to(http, sent_last)) == (400, "invalid_request")

    asyncio.run(main())
    assert not [record for record in caplog.records if record.exc_info]


def test_a_request_for_another_protocol_is_answered_over_this_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            upgrade = (
                b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
            )
            head = POST + upgrade + b"content-length: %d\r\n\r\n" % len(BODY)
            async with connected(http) as (reader, writer):
                for _ in range(2):
                    writer.write(head)
                    await asyncio.sleep(0)  # the body may come later
                    writer.write(BODY)
                    head_of_answer = await reader.readuntil(b"\r\n\r\n")
                    assert head_of_answer.startswith(b"HTTP/1.1 200")
                    (length,) = re.findall(rb"content-length: (\d+)", head_of_answer)
                    assert b'"choices"' in await reader.readexactly(int(length))

    asyncio.run(main())


@pytest.mark.parametrize(
    "host, status",
    [
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.0.7", 200),
        ("localhost", 200),
        ("LOCALHOST.:80", 200),
        ("models.example", 200),
        ("Models.Example:8000", 200),
        ("evil.example", 421),
        ("models.example.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_names_of_the_server(tmp_path: Path, host: str, status: int) -> None:
    async def main() -> None:
        async with serving(tmp_path, allowed_hosts=("models.example", "other")) as http:
            response = await http.raw.get("/v1/models", headers={"host": host})
            assert response.status_code == status
            if status == 421:
                error = response.json()["error"]
                assert error["code"] == "misdirected_request"
                assert "--allowed-hosts" in error["message"]
            assert (await http.raw.get("/health", headers={"host": host})).status_code == 200
        async with serving(tmp_path, token="secret") as http:
            response = await http.raw.get("/v1/models", headers={"host": host})
            assert response.status_code == 200

    asyncio.run(main())


PAGE = "https://chat.example"


@pytest.mark.parametrize("allowed", [(), (PAGE, "http://localhost:3000"), ("*",)])
def test_pages_of_other_origins(tmp_path: Path, allowed: tuple[str, ...]) -> None:
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }

    async def main() -> None:
        async with serving(tmp_path, token="secret", allowed_origins=allowed) as http:
            path = "/v1/completions"
            for origin in (PAGE, "https://evil.example"):
                is_allowed = origin in allowed or "*" in allowed
                echoed = "*" if "*" in allowed else origin
                without_token = {"authorization": "", "origin": origin} | asks
                asked = await http.raw.options(path, headers=without_token)
                assert (asked.status_code == 200) == is_allowed
                found = asked.headers.get("access-control-allow-origin")
                assert found == (echoed if is_allowed else None)
                if is_allowed:
                    assert "POST" in asked.headers["access-control-allow-methods"]
                    wanted = asks["access-control-request-headers"]
                    assert asked.headers["access-control-allow-headers"] == wanted

                headers = {"origin": origin}
                body = {"prompt": "x", "max_tokens": 1, "request_id": "r"}
                answer = await http.post(path, body, headers=headers)
                assert answer.status_code == 200
                found = answer.headers.get("access-control-allow-origin")
                assert found == (echoed if is_allowed else None)
                refused = await http.raw.get(
                    "/v1/models", headers={"authorization": "x", "origin": origin}
                )
                found = refused.headers.get("access-control-allow-origin")
                assert refused.status_code == 401 and found == (echoed if is_allowed else None)

    asyncio.run(main())


@pytest.mark.parametrize("text", ["chat.example", "https://chat.example/", "", "https://"])
def test_what_is_no_origin(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no origin"):
        page_origins(text)


@pytest.mark.parametrize("text", ["a b", "a,", "host:8000", "http://host"])
def test_what_is_no_name_of_a_host(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not the name of a host"):
        host_names(text)
