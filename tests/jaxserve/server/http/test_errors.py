"""Faults of requests: each is named by its place, and no other client notices."""

import asyncio
import errno
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.messages import types as of_messages
from jaxserve.server.http.agents.messages.types import MessagesBody
from jaxserve.server.http.agents.responses import types as of_responses
from jaxserve.server.http.agents.responses.types import ResponsesBody
from jaxserve.server.http.other_fields import IGNORED, ONLY, OTHER_NAMES
from jaxserve.server.http.types import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    StreamOptions,
    TokenizeBody,
)
from tests.jaxserve.server.harness import until
from tests.jaxserve.server.http.harness import TEXT, Http, serving

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hi"}]
HINT = {"cache_control": {"type": "ephemeral"}}
CACHED = {"type": "text", "text": "hi"} | HINT
CACHED_TOOL = {"type": "function", "function": {"name": "add"}} | HINT
CACHED_FUNCTION = {"type": "function", "function": {"name": "add"} | HINT}
CACHED_MESSAGE = {"role": "user", "content": [CACHED]}
KINDS: dict[str, tuple[type[Body], dict[str, Any]]] = {
    COMPLETIONS: (CompletionBody, {"prompt": TEXT, "max_tokens": 2}),
    CHAT: (ChatBody, {"messages": MESSAGES, "max_tokens": 2, "logprobs": True}),
    EMBEDDINGS: (EmbeddingBody, {"input": TEXT}),
    "/tokenize": (TokenizeBody, {"prompt": TEXT}),
    "/detokenize": (DetokenizeBody, {"tokens": [65]}),
}
VALUES = [
    {},
    {"a": 1},
    [],
    [{}],
    [[]],
    [1.5],
    ["x", 1],
    "",
    "\ud800",
    "never",
    1.5,
    True,
    -1,
    0,
    2**70,
    10**400,
]
REQUIRED = {"prompt", "messages", "tokens", "input"}
ALL_KINDS = KINDS | {
    "/v1/responses": (ResponsesBody, {"input": "hi", "max_output_tokens": 2}),
    "/v1/responses/input_tokens": (of_responses.CountBody, {"input": "hi"}),
    "/v1/messages": (MessagesBody, {"messages": MESSAGES, "max_tokens": 2}),
    "/v1/messages/count_tokens": (of_messages.CountBody, {"messages": MESSAGES}),
}


async def refused(
    http: Http, path: str, body: Any, canary: bytes, **options: Any
) -> tuple[int, str | None, str]:
    """Post a bad body; return status, param and code."""
    content = json.dumps(body).encode() if not isinstance(body, bytes) else body
    headers = {"content-type": "application/json"} | options
    response = await http.raw.post(path, content=content, headers=headers)
    assert await http.canary() == canary
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert "incident" not in error["message"], body
    return response.status_code, error["param"], error["code"]


def field_of(error: dict[str, Any]) -> str:
    """Return the field of the body that an error names; Anthropic's errors do so in the text."""
    named = error.get("param") or error["message"].split(" ")[0].rstrip(":")
    return "model" if named == "the" else re.split(r"[.[]", named)[0]


@pytest.mark.system
@pytest.mark.parametrize("path", ALL_KINDS)
def test_every_field_with_every_kind_of_value(tmp_path: Path, path: str) -> None:
    kind, good = ALL_KINDS[path]
    required = REQUIRED | ({"max_tokens"} if path == "/v1/messages" else set())

    async def main() -> None:
        async with serving(tmp_path, embeds=path == EMBEDDINGS) as http:
            canary = await http.canary()
            for name in kind.model_fields:
                statuses = set()
                for value in VALUES:
                    content = json.dumps(good | {name: value}).encode()
                    headers = {"content-type": "application/json"}
                    response = await http.raw.post(path, content=content, headers=headers)
                    statuses.add(response.status_code)
                    if response.status_code != 200:
                        error = response.json()["error"]
                        assert response.status_code in (400, 404), (name, value, error)
                        assert "incident" not in error["message"], error
                        assert field_of(error) in (name, "prompt"), error
                assert await http.canary() == canary, name
                assert 400 in statuses, name
                status = (await http.post(path, good | {name: None})).status_code
                assert status == (400 if name in good and name in required else 200), name
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_that_are_not_heeded(tmp_path: Path, path: str) -> None:
    good = KINDS[path][1]

    async def main() -> None:
        async with serving(tmp_path) as http:
            canary = await http.canary()
            for name in IGNORED:
                assert (await http.post(path, good | {name: "anything"})).status_code == 200
            for name, values in ONLY.items():
                for value in (*values, None):
                    assert (await http.post(path, good | {name: value})).status_code == 200
                bad = good | {name: {"type": "other"}}
                own = name in KINDS[path][0].model_fields
                reason = (
                    "invalid_value" if own and name != "tool_choice" else "unsupported_parameter"
                )
                assert await refused(http, path, bad, canary) == (400, name, reason)
            assert await refused(http, path, good | {"temprature": 1}, canary) == (
                400,
                "temprature",
                "unknown_parameter",
            )
            assert (await http.post(path, good | {"guided_json": None})).status_code == 200
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize(
    "path, body, ignored",
    [
        (COMPLETIONS, {}, None),
        (COMPLETIONS, {"store": True, "service_tier": "flex"}, "store, service_tier"),
        (COMPLETIONS, {"user": None, "guided_json": None}, None),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"n": 1.0, "max_tokens": 5.0, "seed": 3.0, "top_k": 4.0}, None),
        (CHAT, {"reasoning_effort": "none", "verbosity": "medium"}, "reasoning_effort, verbosity"),
        (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 0}, None),
        (CHAT, {"messages": [{"role": "user", "content": [CACHED]}]}, "cache_control"),
        (CHAT, {"messages": [*MESSAGES, {"role": "assistant", "content": None}]}, None),
        (CHAT, {"tools": [CACHED_TOOL], "tool_choice": "none"}, "cache_control"),
        (CHAT, {"tools": [CACHED_FUNCTION], "tool_choice": "none"}, "cache_control"),
        ("/tokenize", {"prompt": None, "messages": [CACHED_MESSAGE]}, "cache_control"),
    ],
)
def test_fields_that_ask_for_nothing(
    tmp_path: Path, path: str, body: dict[str, Any], ignored: str | None
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            response = await http.post(path, KINDS[path][1] | body)
            assert response.status_code == 200, response.text
            assert response.headers.get("jaxserve-ignored") == ignored
            if path != "/tokenize":
                streamed = KINDS[path][1] | body | {"stream": True}
                response = await http.post(path, streamed)
                named = ignored if ignored != "stream_options" else None
                assert response.headers.get("jaxserve-ignored") == named

    asyncio.run(main())


def test_fields_of_other_servers(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            for name, ours in OTHER_NAMES.items():
                response = await http.post(CHAT, KINDS[CHAT][1] | {name: 1})
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, name)
                assert error["message"].endswith(f"use {ours}") and ours in ChatBody.model_fields
            half = {"max_tokens": 1.5, "n": 1e30}
            for name, value in half.items():
                response = await http.post(COMPLETIONS, {"prompt": "x"} | {name: value})
                assert (response.status_code, response.json()["error"]["param"]) == (400, name)

    asyncio.run(main())


def test_stream_options(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            canary = await http.canary()
            good = KINDS[COMPLETIONS][1] | {"stream": True}
            for name in StreamOptions.model_fields:
                options = {"stream_options": {name: "yes"}}
                assert await refused(http, COMPLETIONS, good | options, canary) == (
                    *(400, f"stream_options.{name}"),
                    "invalid_value",
                )
                assert (
                    await http.post(COMPLETIONS, good | {"stream_options": {name: None}})
                ).status_code == 200
            options = {"stream_options": {"include_obfuscation": True}}
            assert (await refused(http, COMPLETIONS, good | options, canary))[
                1
            ] == "stream_options.include_obfuscation"
            options = {"stream_options": {"other": True}}
            assert (await refused(http, COMPLETIONS, good | options, canary))[
                2
            ] == "unknown_parameter"

    asyncio.run(main())


OUT_OF_BOUNDS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": ["x"] * 65}, "prompt"),
    (COMPLETIONS, {"prompt": ["x", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [258]]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": ["x", ["y"]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", "\ud800"]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "x"]}, "prompt"),
    (COMPLETIONS, {"n": 17}, "n"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    (COMPLETIONS, {"min_tokens": 3}, "min_tokens"),
    (COMPLETIONS, {"stop": ["x"] * 17}, "stop"),
    (COMPLETIONS, {"stop": "\ud800"}, "stop"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"07": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"7": 101}}, "logit_bias[7]"),
    (COMPLETIONS, {"logit_bias": {"999": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (COMPLETIONS, {"request_id": "r" * 129}, "request_id"),
    (COMPLETIONS, {"priority": 101}, "priority"),
    (COMPLETIONS, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"echo": True}, "echo"),
    ("/tokenize", {"messages": MESSAGES}, "prompt"),
    ("/detokenize", {"tokens": [258]}, "tokens"),
]


def test_values_out_of_bounds(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            canary = await http.canary()
            for path, given, param in OUT_OF_BOUNDS:
                status, named, _ = await refused(http, path, KINDS[path][1] | given, canary)
                assert (status, named) == (400, param), given
            await http.server.at_rest()

    asyncio.run(main())


NO_OBJECTS = [
    b"",
    b"{",
    b"[]",
    b'"prompt"',
    b"null",
    b'{"prompt": "\xff"}',
    '{"prompt": "x"}'.encode("utf-16"),
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "x", "user": NaN}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "user": -1e999}',
    b'{"prompt": "x", "prompt": "y"}',
    b'{"prompt": "x"} {}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
]


def test_bodies_that_are_no_json_object(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            canary = await http.canary()
            for body in NO_OBJECTS:
                assert await refused(http, COMPLETIONS, body, canary) == (
                    400,
                    None,
                    "invalid_body",
                ), body[:50]

    asyncio.run(main())


def test_what_nests_deeply(tmp_path: Path) -> None:
    """JSON may nest as deep as the parser allows, in every field that takes any value."""

    async def main() -> None:
        async with serving(tmp_path) as http:
            canary = await http.canary()
            for depth in (900, 1400, 100_000):
                deep = '{"a":' * depth + "1" + "}" * depth
                for path, part in (
                    (CHAT, '"messages": [{"role": "user", "content": "x", "name": %s}]'),
                    (CHAT, '"messages": [{"role": "user", "content": %s}]'),
                    (CHAT, '"messages": [{"role": "user", "content": [{"type": %s}]}]'),
                    (CHAT, '"messages": [{"role": "user", "content": "x"}], "response_format": %s'),
                    (COMPLETIONS, '"prompt": "x", "logit_bias": %s'),
                    (COMPLETIONS, '"prompt": [1, %s]'),
                ):
                    body = ("{" + part % deep + "}").encode()
                    assert (await refused(http, path, body, canary))[0] == 400

    asyncio.run(main())


@pytest.mark.parametrize(
    "path, body, field",
    [
        (COMPLETIONS, b'{"prompt": "a", "\\ud800": 1}', r"\ud800"),
        (COMPLETIONS, b'{"prompt": "a", "stream_options": {"x\\udfff": 1}}', r"x\udfff"),
        ("/tokenize", b'{"prompt": "a", "\\ud800": 1}', r"\ud800"),
        (EMBEDDINGS, b'{"input": "a", "\\ud800": 1}', r"\ud800"),
        (CHAT, b'{"messages": [{"role": "user", "content": "a", "\\ud800": 1}]}', "messages[0]"),
        (CHAT, b'{"messages": [{"\\ud800": 1}]}', "messages[0].role"),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": '
            b'[{"type": "text", "text": "", "\\ud800": 1}]}]}',
            r"messages[0].content[0].\ud800",
        ),
        (
            COMPLETIONS,
            b'{"prompt": "a", "response_format": {"type": "text", "\\ud800": 1}}',
            r"response_format.\ud800",
        ),
    ],
)
def test_names_with_half_a_surrogate_pair(
    tmp_path: Path, path: str, body: bytes, field: str
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            status, param, _ = await refused(http, path, body, await http.canary())
            assert status == 400 and param is not None and param.endswith(field)

    asyncio.run(main())


def test_headers_that_servers_read_in_different_ways(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, token="secret") as http:
            canary = await http.canary()
            for encoding in ("gzip", "deflate, identity", "br", ""):
                given = {"content-encoding": encoding}
                found = await refused(http, COMPLETIONS, {"prompt": "x"}, canary, **given)
                assert found == (415, None, "unsupported_media_type"), encoding
            plain = {"content-encoding": "Identity"}
            response = await http.post(COMPLETIONS, {"prompt": "x"}, headers=plain)
            assert response.status_code == 200

            for bad in (
                "1_0",
                "+5",
                "1e1",
                "5 0",
                "0.0",
                "1.",
                ".5",
                "\N{ARABIC-INDIC DIGIT FIVE}",
            ):
                given = {"x-request-timeout": bad.encode()}
                response = await http.post(COMPLETIONS, {"prompt": "x"}, headers=given)
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, "x-request-timeout"), bad

            response = await http.raw.get("/health", headers={"x-request-id": "x" * 128})
            assert (response.status_code, response.headers["x-request-id"]) == (200, "x" * 128)
            response = await http.raw.get("/health", headers={"x-request-id": "x" * 129})
            assert (response.status_code, response.json()["error"]["param"]) == (
                400,
                "x-request-id",
            )
            assert "x-request-id" not in response.headers

            twice = [("authorization", "Bearer secret"), ("authorization", "Bearer secret")]
            response = await http.raw.get("/v1/models", headers=twice)
            assert response.status_code == 401 and "2 authorization headers" in response.text

            assert await http.canary() == canary

    asyncio.run(main())


@pytest.mark.system
def test_sizes_and_media_types(tmp_path: Path) -> None:
    async def main() -> None:
        limits = Limits(max_body_bytes=2000)
        async with serving(tmp_path, limits=limits) as http:
            canary = await http.canary()
            large = {"prompt": "x" * 2000}
            assert await refused(http, COMPLETIONS, large, canary) == (
                413,
                None,
                "request_too_large",
            )

            headers = {"x-large": "x" * Limits().max_header_bytes}
            response = await http.post(COMPLETIONS, {"prompt": "x"}, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (
                431,
                "headers_too_large",
            )

            async def unannounced() -> AsyncIterator[bytes]:
                for _ in range(5):
                    yield b" " * 500

            headers = {"content-type": "application/json"}
            response = await http.raw.post(COMPLETIONS, content=unannounced(), headers=headers)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (413, "request_too_large")
            assert await http.canary() == canary
            announced = await _answer(http, f"POST {COMPLETIONS} HTTP/1.1", "content-length: 2001")
            assert announced.startswith(b"HTTP/1.1 413") and b"request_too_large" in announced
            for media in ("text/plain", "", "application/x-www-form-urlencoded"):
                given = {"content-type": media}
                body = {"prompt": "x"}
                assert await refused(http, COMPLETIONS, body, canary, **given) == (
                    415,
                    None,
                    "unsupported_media_type",
                )
            fine = {"content-type": "Application/JSON; charset=utf-8"}
            assert (
                await http.raw.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=fine)
            ).status_code == 200

    asyncio.run(main())


async def _answer(http: Http, *head: str) -> bytes:
    """Return the response to the head of a request whose body never comes."""
    address = httpx.URL(http.base)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    lines = [*head, "host: localhost", "content-type: application/json", "", ""]
    writer.write("\r\n".join(lines).encode())
    try:
        found = await reader.readuntil(b"\r\n\r\n")
        return found + await reader.read(1000)
    finally:
        writer.close()
        await writer.wait_closed()


def test_the_clients_exceptions(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, token="secret") as http:
            ask = http.client.completions.create
            with pytest.raises(openai.BadRequestError) as bad:
                await ask(model="fake", prompt="x", temperature=2.1)
            assert (bad.value.param, bad.value.code, bad.value.type) == (
                "temperature",
                "invalid_value",
                "invalid_request_error",
            )
            assert bad.value.response.headers["x-should-retry"] == "false"
            with pytest.raises(openai.BadRequestError) as long:
                await ask(model="fake", prompt="x" * 600)
            assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")
            with pytest.raises(openai.NotFoundError) as model:
                await ask(model="gpt-5", prompt="x")
            assert model.value.code == "model_not_found"
            with pytest.raises(openai.NotFoundError):
                await http.client.models.retrieve("gpt-5")
            with pytest.raises(
                openai.BadRequestError, match="generates text and makes no embeddings"
            ) as embed:
                await http.client.embeddings.create(model="fake", input="x")
            assert (embed.value.status_code, embed.value.code) == (400, "purpose")
            assert embed.value.response.headers["x-should-retry"] == "false"
            with pytest.raises(openai.AuthenticationError) as unknown:
                await http.client.with_options(api_key="wrong").completions.create(
                    model="fake", prompt="x"
                )
            assert (unknown.value.code, unknown.value.type) == (
                "invalid_api_key",
                "authentication_error",
            )
            assert unknown.value.response.headers["www-authenticate"] == "Bearer"
            await http.server.at_rest()

    asyncio.run(main())


def test_a_full_queue_is_tried_again(tmp_path: Path) -> None:
    """The refusal says when to try again, and OpenAI's client does so by itself."""

    async def main() -> None:
        async with serving(tmp_path, limits=Limits(max_waiting_requests=1)) as http:
            ask = {"model": "fake", "prompt": "x", "max_tokens": 3, "seed": 1}
            with http.server.holding():
                blocker = asyncio.create_task(http.client.completions.create(**ask))  # type: ignore[arg-type]
                await until(lambda: http.server.service.in_flight)
                with pytest.raises(openai.RateLimitError) as full:
                    await http.client.completions.create(**ask)  # type: ignore[arg-type]
            headers = full.value.response.headers
            assert (full.value.code, full.value.type) == ("rate_limit_exceeded", "rate_limit_error")
            milliseconds = int(headers["retry-after-ms"])
            assert 0 < milliseconds <= 2000
            assert headers["retry-after"] == str(math.ceil(milliseconds / 1000))
            assert headers["x-should-retry"] == "true"
            reply = await http.client.with_options(max_retries=5).completions.create(**ask)  # type: ignore[arg-type]
            assert reply.choices[0].text == (await blocker).choices[0].text
            await http.server.at_rest()

    asyncio.run(main())


def test_ids_in_flight(tmp_path: Path) -> None:
    """If one of several prompts cannot be admitted, the others end too."""

    async def main() -> None:
        async with serving(tmp_path, seconds=0.02) as http:
            body = {"prompt": "x", "max_tokens": 50, "request_id": "a-1", "ignore_eos": True}
            blocker = asyncio.create_task(http.post(COMPLETIONS, body))
            while not http.server.service.in_flight:
                await asyncio.sleep(0.001)
            for path, given in (
                (COMPLETIONS, {"prompt": ["x", "y"], "request_id": "a"}),
                (COMPLETIONS, body),
            ):
                response = await http.post(path, given)
                assert (response.status_code, response.json()["error"]["code"]) == (
                    409,
                    "request_id_in_use",
                )
                assert http.server.service.in_flight == 1
            assert (await blocker).status_code == 200
            await http.server.at_rest()

    asyncio.run(main())


def test_a_bug_is_an_incident(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:

            async def broken(*_: object) -> None:
                raise KeyError("a secret")

            http.server.service._encoder.prepare = broken  # type: ignore[method-assign, assignment]
            response = await http.post(COMPLETIONS, {"prompt": "x"})
            error = response.json()["error"]
            assert (response.status_code, error["type"], error["code"]) == (
                500,
                "server_error",
                "internal",
            )
            assert "secret" not in response.text
            incident = error["message"].split()[-1].rstrip(")")
            assert incident in caplog.text and "a secret" in caplog.text

    asyncio.run(main())


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files: '/secret'"), MemoryError()]
)
def test_a_machine_without_files_or_memory_is_no_incident(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            canary = await http.canary()
            prepare = http.server.service._encoder.prepare

            async def broken(*_: object) -> None:
                raise error

            http.server.service._encoder.prepare = broken  # type: ignore[method-assign, assignment]
            response = await http.post(COMPLETIONS, {"prompt": "x"})
            assert (response.status_code, response.json()["error"]["code"]) == (
                503,
                "host_exhausted",
            )
            assert response.headers["retry-after"] == "1" and "secret" not in response.text
            assert "a request is refused" in caplog.text and "Traceback" not in caplog.text
            http.server.service._encoder.prepare = prepare  # type: ignore[method-assign]
            assert await http.canary() == canary

    asyncio.run(main())
