"""Requests that hide another one: in a body, behind a length, in a line, in a header's value."""

import asyncio
from pathlib import Path

import pytest

from tests.jaxserve.server.http.harness import serving
from tests.jaxserve.server.http.raw_sockets import (
    BODY,
    CHUNKED,
    GET,
    LAST,
    POST,
    all_of,
    answer_to,
    connected,
    launched,
    problem,
    statuses,
    undisturbed,
)

AUTHORIZED = b"authorization: Bearer secret\r\n"
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + AUTHORIZED + b"\r\n"
REFUSED = {  # heads that are answered before a byte of the body is read, by the answer's status
    401: POST,
    415: POST.replace(b"application/json", b"text/plain") + AUTHORIZED,
}
REST = BODY + b"\r\n0\r\n\r\n"  # of chunks, behind the size of the first
CLOSING = CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


@pytest.mark.parametrize("status", REFUSED)
def test_the_body_of_a_refused_request_is_no_request(tmp_path: Path, status: int) -> None:
    head = REFUSED[status] + b"content-length: %d\r\n\r\n" % len(HIDDEN)

    async def main() -> None:
        async with serving(tmp_path, token="secret") as http, undisturbed(http):
            answers = await answer_to(http, head + HIDDEN + LAST)
            assert statuses(answers) == [status, 200]
            assert answers.endswith(b'{"status":"ready"}') and b'"data"' not in answers
            async with connected(http) as (reader, writer):
                writer.write(head)
                answer = await reader.readuntil(b"\r\n\r\n")
                assert statuses(answer) == [status] and b"connection: close" in answer
                writer.write(HIDDEN)
                assert not statuses(await all_of(reader))

    asyncio.run(main())


FRAMING = [
    b"content-length: -1",
    "content-length: \N{ARABIC-INDIC DIGIT THREE}\N{ARABIC-INDIC DIGIT TWO}".encode(),
    b"content-length: 99999999999999999999999999",
    b"content-length: 18446744073709551616",  # 2**64
    b"content-length: 32\r\ncontent-length: 32",
    b"content-length: 32, 32",
    b"content-length: 32;",
    b"content-length:",
    b"transfer-encoding: chunked, identity",
    b"transfer-encoding: chunked\x0b",
    b"transfer-encoding:\x0bchunked",
    b"transfer-encoding: chunked;q=1",
    b'transfer-encoding: "chunked"',
    b"transfer-encoding: chunked,",
    b"transfer-encoding:",
    b"transfer-encoding : chunked",
    b"transfer\x0b-encoding: chunked",
]


def test_lengths_that_are_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            assert len(BODY) == 32
            for line in FRAMING:
                answer = await answer_to(http, POST + line + b"\r\n\r\n" + BODY + GET)
                assert problem(answer) == (400, "invalid_request"), line
                assert statuses(answer) == [400], line
            assert not launched(http)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("encoding", "status"),
    [(b"chunked", 200), (b"Chunked", 200), (b"identity, chunked", 400), (b", chunked", 400)],
)
def test_encodings_before_chunks(tmp_path: Path, encoding: bytes, status: int) -> None:
    """The parser takes a list that ends with chunked, which a proxy may understand otherwise."""
    head = CLOSING.replace(b"chunked", encoding)

    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            answer = await answer_to(http, head + b"20\r\n" + REST + GET)
            assert statuses(answer) == [status]
            assert len(launched(http)) == (status == 200)

    asyncio.run(main())


CHUNKS = [
    b"20\n" + REST,
    b"20\r" + REST,
    b"20;a\nb\r\n" + REST,
    b"20;a\rb\r\n" + REST,
    b"20;\x00\r\n" + REST,
    b"20\r\n" + BODY + b"\n0\r\n\r\n",
    b"20\r\n" + BODY + b"0\r\n\r\n",
    b"20\r\n" + BODY + b"\r\n0\n\n",
    b"20\r\n" + BODY + b"\r\n0\r\na: b\n\r\n",
    b"20\r\n" + BODY + b"\r\n0\r\n\n",
    b"0x20\r\n" + REST,
    b"+20\r\n" + REST,
    b"-20\r\n" + REST,
    b"2_0\r\n" + REST,
    b" 20\r\n" + REST,
    b"20 \r\n" + REST,
    b"10000000000000020\r\n" + REST,  # 2**64 + 32
    "\N{ARABIC-INDIC DIGIT TWO}\N{ARABIC-INDIC DIGIT ZERO}\r\n".encode() + REST,
]


def test_chunks_whose_ends_are_elsewhere_for_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            for chunks in CHUNKS:
                answer = await answer_to(http, CLOSING + chunks + GET)
                assert problem(answer) == (400, "invalid_request"), chunks
                assert statuses(answer) == [400], chunks
            assert not launched(http)
            fine = await answer_to(http, CLOSING + b"20;a=b\r\n" + REST + GET)
            assert statuses(fine) == [200] and len(launched(http)) == 1

    asyncio.run(main())


BARE = [
    GET.replace(b"\r\n", b"\n"),
    GET.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n"),
    GET.replace(b"localhost\r\n", b"localhost\n"),
    GET.replace(b"\r\n\r\n", b"\r\n\n"),
    GET.replace(b"\r\n\r\n", b"\r\na: b\nc: d\r\n\r\n"),
    GET.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\r\n"),
]


def test_lines_that_end_with_half_an_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            for sent in BARE:
                answer = await answer_to(http, sent + LAST)
                assert problem(answer) == (400, "invalid_request"), sent
                assert statuses(answer) == [400], sent

    asyncio.run(main())


def test_a_websocket_is_answered_over_http(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes behind such a request are the next one, and no frames."""
    upgrade = (
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    asked = GET.replace(b"\r\n\r\n", b"\r\n" + upgrade)

    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            answers = await answer_to(http, asked + asked, LAST)
            assert statuses(answers) == [200, 200, 200]
            assert b"upgrade" not in answers.lower()

    asyncio.run(main())
    assert "uvicorn" not in caplog.text


ECHOED = [b"a\tb", b"\xe9\xff", b"\xc3\xa9", b"%0d%0ax: y", b"\\r\\nx: y", b"a: b, c=d;e"]
BROKEN = [b"a\x01b", b"a\x0bb", b"a\x00b", b"a\x7fb", b"a\x1b[31mb", b"a\rx: y", b"a\nx: y"]
NAMES = {b"date", b"content-length", b"content-type", b"x-request-id", b"connection"}


def test_an_echoed_id_is_one_header(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            for given in ECHOED:
                sent = LAST.replace(b"host:", b"x-request-id: " + given + b"\r\nhost:")
                answer = await answer_to(http, sent)
                status, *lines = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
                headers = dict(line.split(b": ", 1) for line in lines)
                assert status == b"HTTP/1.1 200 OK" and headers.keys() == NAMES, given
                assert headers[b"x-request-id"] == given
            for given in BROKEN:
                sent = LAST.replace(b"host:", b"x-request-id: " + given + b"\r\nhost:")
                answer = await answer_to(http, sent)
                assert problem(answer) == (400, "invalid_request"), given
                assert b"x-request-id" not in answer and b"\r\nx: y" not in answer

    asyncio.run(main())
