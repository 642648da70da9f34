"""Texts of bodies: what UTF-8 and JSON forbid is refused, what they allow reaches the model."""

import asyncio
import json
from pathlib import Path

from tests.jaxserve.server.http.harness import serving
from tests.jaxserve.server.http.raw_sockets import (
    POST,
    answer_to,
    launched,
    problem,
    statuses,
    undisturbed,
)

CLOSING = POST + b"connection: close\r\n"
REFUSED = {
    "half a surrogate pair": b'{"prompt": "\xed\xa0\x80"}',
    "a pair of surrogates, as CESU-8 has": b'{"prompt": "\xed\xa0\xbd\xed\xb8\x80"}',
    "an overlong NUL": b'{"prompt": "\xc0\x80"}',
    "an overlong slash": b'{"prompt": "\xe0\x80\xaf"}',
    "above the last code point": b'{"prompt": "\xf4\x90\x80\x80"}',
    "half a character at the end": b'{"prompt": "\xe2\x82"}',
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "a NUL that is not escaped": b'{"prompt": "\x00"}',
    "a NUL behind the body": b'{"prompt": "x"}\x00',
}
TEXTS = ["\x00", "a\x00b", "\u202egnp.exe", "\u2028", "\ufeff", "\ufffe", "\x1b[31m", "\U0010ffff"]


def whole(body: bytes) -> bytes:
    """Return the request with this body."""
    return CLOSING + b"content-length: %d\r\n\r\n" % len(body) + body


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            for name, body in REFUSED.items():
                assert problem(await answer_to(http, whole(body))) == (400, "invalid_body"), name
            assert not launched(http)

    asyncio.run(main())


def test_texts_that_are_odd(tmp_path: Path) -> None:
    """They come back as they were sent, escaped in the request or not."""

    async def main() -> None:
        async with serving(tmp_path) as http, undisturbed(http):
            for text in TEXTS:
                asked = {"prompt": text, "echo": True, "max_tokens": 1}
                escaped = json.dumps(asked).encode()
                plain = json.dumps(asked, ensure_ascii=False).encode()
                for body in (escaped, plain):
                    answer = await answer_to(http, whole(body))
                    assert statuses(answer) == [200], ascii(text)
                    (choice,) = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]
                    assert choice["text"].startswith(text), ascii(text)

    asyncio.run(main())
