"""Every ending of a request over HTTP: one status, all pages back, no task left."""

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from jaxserve.errors import EngineError
from jaxserve.server.core.limits import Limits
from tests.jaxserve.server.harness import until
from tests.jaxserve.server.http.harness import TEXT, Http, expected, serving

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {
    "prompt": TEXT,
    "max_tokens": 400,
    "ignore_eos": True,
    "seed": 1,
}  # some 4 seconds of steps of 10 ms
LONG_CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 400,
    "ignore_eos": True,
    "seed": 1,
}


async def in_flight(http: Http, count: int = 1) -> None:
    while http.server.service.in_flight != count:
        await asyncio.sleep(0.001)


async def at_rest_at_once(http: Http) -> None:
    """Wait until nothing is left; no request has ended by itself."""
    await http.server.at_rest()
    await until(lambda: not task_names() & {"_forward", "_disconnect", "_stream", "_whole"})
    launches = http.server.runner.launches.values()
    assert max(launches, default=0) < 400, "a request had a step for every token"


def task_names() -> set[str]:
    return {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]


@pytest.mark.system
@pytest.mark.parametrize(
    "path, body",
    [
        (COMPLETIONS, LONG),
        (CHAT, LONG_CHAT | {"n": 3}),
        (COMPLETIONS, LONG | {"prompt": ["a", "b"]}),
    ],
)
def test_a_stream_that_is_dropped(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.01) as http:
            canary = await http.canary()
            async with http.raw.stream("POST", path, json=body | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    assert line.startswith("data: {")
                    break
            await at_rest_at_once(http)
            assert await http.canary() == canary

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [TEXT, ["a", "b", "c"]])
def test_a_client_that_goes_before_it_is_answered(
    tmp_path: Path, stream: bool, prompt: str | list[str]
) -> None:
    """Without a stream the client may go at any time, with one before the first event."""

    async def main() -> None:
        async with serving(tmp_path, seconds=0.05 if stream else 0.01) as http:
            canary = await http.canary()
            request = asyncio.create_task(
                http.post(COMPLETIONS, LONG | {"prompt": prompt, "stream": stream})
            )
            await in_flight(http, 1 if isinstance(prompt, str) else len(prompt))
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            await at_rest_at_once(http)
            assert await http.canary() == canary

    asyncio.run(main())


@pytest.mark.system
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_loses_its_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """The answer is larger than all buffers on the way."""
    caplog.set_level(logging.INFO, "jaxserve")

    async def main() -> None:
        limits = Limits(max_unread_tokens=10**6)
        async with serving(tmp_path, tops=True, limits=limits) as http:
            canary = await http.canary()
            body = LONG_CHAT | {"n": 16, "logprobs": True, "top_logprobs": 20, "stream": stream}
            with _connection(http) as connection:
                await asyncio.get_running_loop().sock_sendall(connection, _post(CHAT, body))
                await in_flight(http)
                object.__setattr__(limits, "slow_client_seconds", 0.2)
                while "HTTP connections closed: 1 SLOW_CONSUMER" not in caplog.text:
                    await asyncio.sleep(0.01)
                object.__setattr__(limits, "slow_client_seconds", 3600.0)
                assert await http.canary() == canary  # while the client is still there
                assert len(http.open_connections) <= 2  # the canary's, perhaps, and no other
            await http.server.at_rest()

    asyncio.run(main())


def _post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def _connection(http: Http) -> socket.socket:
    """Connect with a receive buffer of a few KiB."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    address = httpx.URL(http.base)
    connection.connect((address.host, address.port))
    connection.setblocking(False)
    return connection


@pytest.mark.system
def test_what_was_answered_is_read_to_its_end_before_the_server_ends(tmp_path: Path) -> None:
    """The body is larger than all buffers on the way, and its client begins to read late."""

    async def main() -> None:
        async with serving(tmp_path, tops=True) as http:
            loop = asyncio.get_running_loop()
            body = LONG_CHAT | {"n": 16, "logprobs": True, "top_logprobs": 20}
            with _connection(http) as connection:
                await loop.sock_sendall(connection, _post(CHAT, body))
                await in_flight(http)
                await http.server.at_rest()
                stopping = asyncio.create_task(http.server.stop(600))
                await asyncio.sleep(0.5)
                assert not stopping.done()
                head, _, content = (await _all_of(connection)).partition(b"\r\n\r\n")
                assert (
                    f"content-length: {len(content)}".encode() in head and len(content) > 4 * 2**20
                )
                assert len(json.loads(content)["choices"]) == 16
                await stopping

    asyncio.run(main())


async def _all_of(connection: socket.socket) -> bytes:
    parts = []
    while part := await asyncio.get_running_loop().sock_recv(connection, 2**20):
        parts.append(part)
    return b"".join(parts)


def test_an_http_server_that_fails_is_noticed(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:

            async def broken(counter: int) -> bool:
                raise OSError("no more")

            http.uvicorn.on_tick = broken  # type: ignore[method-assign]
            while not http.server.failures:
                await asyncio.sleep(0.01)
            assert str(http.server.failures) == "[OSError('no more')]"

    asyncio.run(main())


def test_unread_tokens_end_a_stream_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, limits=Limits(max_unread_tokens=10)) as http:
            service = http.server.service
            answer = http.server.service.answer

            async def held(call: Any) -> Any:
                """Hold an answer unread for a while."""
                admitted = await answer(call)
                while service.in_flight:
                    await asyncio.sleep(0.001)
                return admitted

            service.answer = held  # type: ignore[method-assign]
            response = await http.post(COMPLETIONS, LONG)
            assert (response.status_code, response.json()["error"]["code"]) == (
                429,
                "slow_consumer",
            )
            assert response.headers["x-should-retry"] == "false"
            *_, last = await http.events(COMPLETIONS, LONG)
            assert last["error"]["code"] == "slow_consumer"

    asyncio.run(main())


@pytest.mark.system
def test_deadlines(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.01) as http:
            canary = await http.canary()
            soon = {"x-request-timeout": "0.1", "x-request-id": "theirs"}
            response = await http.post(COMPLETIONS, LONG, headers=soon)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["type"]) == (
                504,
                "deadline",
                "server_error",
            )
            assert (
                response.headers["x-should-retry"] == "false"
                and response.headers["x-request-id"] == "theirs"
            )
            for bad in ("soon", "0", "-1", "nan", "inf", ""):
                response = await http.post(COMPLETIONS, LONG, headers={"x-request-timeout": bad})
                assert (response.status_code, response.json()["error"]["param"]) == (
                    400,
                    "x-request-timeout",
                )
            with pytest.raises(openai.APIError, match="deadline"):
                stream = await http.client.completions.create(
                    model="fake", prompt=TEXT, max_tokens=400, stream=True, extra_headers=soon
                )
                async for _ in stream:
                    pass
            assert await http.canary() == canary
            await http.server.at_rest()

    asyncio.run(main())


def test_an_error_in_a_stream_is_its_last_event(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.005) as http:
            for body in (LONG, LONG | {"prompt": ["a", "b"]}):
                http.server.runner.spoils = _spoils_after(http, 20)
                *chunks, last = await http.events(
                    COMPLETIONS, body | {"stream_options": {"include_usage": True}}
                )
                assert chunks and all(
                    chunk["choices"][0]["finish_reason"] is None for chunk in chunks
                )
                assert last.keys() == {"error"} and last["error"]["code"] == "non_finite_logits"
                await at_rest_at_once(http)
                http.server.runner.spoils = _spoils_after(http, 20)
                response = await http.post(COMPLETIONS, body)
                assert (response.status_code, response.json()["error"]["code"]) == (
                    500,
                    "non_finite_logits",
                )
                await at_rest_at_once(http)

    asyncio.run(main())


def _spoils_after(http: Http, steps: int) -> Callable[[int, int, int], bool]:
    """Make the device's first row not finite once, after this number of steps."""
    when = http.server.runner.steps + steps
    return lambda number, lane, row: number == when and row == 0


def test_aborted(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.005) as http:
            for body in (LONG, LONG | {"stream": True}):
                request = asyncio.create_task(http.post(COMPLETIONS, body | {"request_id": "mine"}))
                await in_flight(http)
                while not http.server.service.abort("mine"):
                    await asyncio.sleep(0.001)
                response = await request
                assert response.status_code == 200 and response.headers["x-request-id"] == "mine"
                assert '"finish_reason":"abort"' in response.text
                await at_rest_at_once(http)

    asyncio.run(main())


def test_not_ready(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            readiness = http.server.readiness
            served = readiness.state
            readiness.state = None
            for path in ("/v1/models", "/v1/models/fake"):
                response = await http.raw.get(path)
                assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
                assert (
                    response.headers["retry-after"] == "5"
                    and response.headers["x-should-retry"] == "true"
                )
            readiness.state = served
            readiness.set_draining()
            response = await http.post(COMPLETIONS, LONG | {"max_tokens": 2})
            assert (response.status_code, response.headers["connection"]) == (200, "close")
            readiness.set_ended()
            response = await http.post(COMPLETIONS, LONG | {"max_tokens": 2})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
            assert response.headers["connection"] == "close"
            assert (await http.post("/tokenize", {"prompt": "x"})).status_code == 200
            assert (await http.raw.get("/health")).status_code == 503
            readiness.set_failed()
            assert (await http.post(COMPLETIONS, LONG)).json()["error"][
                "code"
            ] == "engine_restarting"

    asyncio.run(main())


def test_the_engine_fails_in_a_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.005) as http:
            request = asyncio.create_task(http.events(COMPLETIONS, LONG))
            await until(lambda: http.server.runner.steps > 5)
            http.server.service.fail_all(EngineError("/a/path"))
            *_, last = await request
            assert last["error"]["code"] == "internal" and "/a/path" not in last["error"]["message"]
            assert "/a/path" in caplog.text
            await http.server.at_rest()

    asyncio.run(main())


def test_many_at_once(tmp_path: Path) -> None:
    """Streams and whole replies run together, and half of the clients go away."""

    async def main() -> None:
        async with serving(tmp_path, seconds=0.001) as http:
            body = {"prompt": TEXT, "max_tokens": 30, "seed": 1}

            async def one(i: int) -> None:
                request = asyncio.create_task(http.post(COMPLETIONS, body | {"stream": i % 3 == 0}))
                if i % 2:
                    await asyncio.sleep(0.01 * (i % 7))
                    request.cancel()
                elif i % 3:
                    assert (await request).json()["choices"][0]["text"] == expected(n=30)
                else:
                    assert (await request).text.endswith("data: [DONE]\n\n")

            await asyncio.gather(*(one(i) for i in range(40)))
            await http.server.at_rest()

    asyncio.run(main())
