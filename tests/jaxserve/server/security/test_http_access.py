"""HTTP requests that nobody may make: without a token, or from a page of another site."""

import asyncio
from pathlib import Path

import pytest

from tests.jaxserve.server.http.harness import serving
from tests.jaxserve.server.http.raw_sockets import (
    BODY,
    answer_to,
    launched,
    problem,
    undisturbed,
)

NO_TOKEN = (401, "invalid_api_key")
NO_PAGE = (404, "unknown_url")
PATHS = {  # as they are sent; some servers read another path out of them
    b"//v1/models": NO_TOKEN,
    b"/./v1/models": NO_TOKEN,
    b"/page/../v1/models": NO_PAGE,
    b"/page//v1/models": NO_PAGE,
    b"/page/%2e%2e/%2e%2e/metrics": NO_PAGE,
    b"/page/..%2f..%2fmetrics": NO_PAGE,
    b"/page/%c0%ae%c0%ae/metrics": NO_PAGE,
    b"/page\\..\\metrics": NO_TOKEN,
    b"/page": NO_TOKEN,
    b"/health/../metrics": NO_TOKEN,
    b"/health;/metrics": NO_TOKEN,
    b"/health%00": NO_TOKEN,
    b"/health%2f..%2fmetrics": NO_TOKEN,
    b"//health": NO_TOKEN,
    b"/HEALTH": NO_TOKEN,
    b"/ping/..": NO_TOKEN,
    b"/v1/models?token=secret": NO_TOKEN,
    b"/v1/models?authorization=Bearer%20secret": NO_TOKEN,
    b"http://localhost/v1/models": NO_TOKEN,
    b"http://localhost/page/../metrics": NO_PAGE,
    b"http://secret@localhost/v1/models": NO_TOKEN,
}
HEADERS = [
    b"x-api-key: other",
    b"x-api-key: ",
    b"x-api-key: secret\r\nx-api-key: secret",
    b"x-api-key: secret\r\nauthorization: Bearer other",
    b"api-key: secret",
    b"cookie: authorization=secret; token=secret",
    b"proxy-authorization: Bearer secret",
    b"x-authorization: Bearer secret",
    b"authorization: Basic secret",
    b"authorization: Bearer",
    b"authorization: Bearer\tsecret",
    b"authorization: Bearer secret, Bearer secret",
    b"x-original-url: /health",
    b"x-rewrite-url: /health",
    b"x-http-method-override: OPTIONS",
]


def test_ways_around_the_token(tmp_path: Path) -> None:
    metrics = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    right = [
        b"authorization: Bearer secret\r\n\r\n",
        b"authorization: \tBearer secret \t\r\n\r\n",
        b"x-api-key: secret\r\n\r\n",
        b"x-api-key: secret\r\nauthorization: bearer secret\r\n\r\n",
        b"x-api-key: \r\nauthorization: Bearer secret\r\n\r\n",
    ]

    async def main() -> None:
        async with serving(tmp_path, token="secret") as http, undisturbed(http):
            for path, wanted in PATHS.items():
                head = b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                assert problem(await answer_to(http, head)) == wanted, path
            for line in HEADERS:
                answer = await answer_to(http, metrics + line + b"\r\n\r\n")
                assert problem(answer) == NO_TOKEN, line
            for lines in right:
                assert (await answer_to(http, metrics + lines)).endswith(b"fake_metric 1\n")

    asyncio.run(main())


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"content-type: text/plain\r\n",
        b"content-type: text/plain; application/json\r\n",
        b"content-type: text/plain, application/json\r\n",
        b"content-type: text/plain\r\ncontent-type: application/json\r\n",
        b"content-type: application/x-www-form-urlencoded\r\n",
        b"content-type: multipart/form-data; boundary=x\r\n",
    ],
)
def test_what_pages_of_other_sites_may_post_without_asking(tmp_path: Path, lines: bytes) -> None:
    """Browsers ask the server before they send application/json, and nothing else is read."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + lines
    head += b"origin: https://evil.example\r\ncontent-length: %d\r\n\r\n" % len(BODY)

    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            answer = await answer_to(http, head + BODY)
            assert problem(answer) == (415, "unsupported_media_type")
            assert not launched(http) and b"access-control" not in answer

    asyncio.run(main())
