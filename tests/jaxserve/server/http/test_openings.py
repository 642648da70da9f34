"""How a stream begins: its status line and first chunk with the row, comments until a token."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.server.http import streams
from tests.jaxserve.server.harness import until
from tests.jaxserve.server.http.harness import Http, serving
from tests.jaxserve.server.http.scripted_model import ADD, ARGUMENTS, ASKED, FORMS, Says, speaking

PATH = "/v1/chat/completions"
COMMENT = ": keep-alive"
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
BODY = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 4,
    "seed": 1,
    "stream": True,
    "stream_options": OPTIONS,
}
PROMPT_TOKENS = len("user: hello\n")


def opened(http: Http, path: str = PATH, **changes: Any) -> Any:
    return http.raw.stream("POST", path, json=BODY | changes)


async def frames(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line:
            yield line


def data(line: str) -> Any:
    assert line.startswith("data: "), line
    return json.loads(line[6:])


def test_the_opening_comes_with_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's first step has begun, and no token is there."""
    monkeypatch.setattr(streams, "ROW_SECONDS", 3600.0)

    async def main() -> None:
        async with serving(tmp_path) as http:
            with http.server.holding(step=2) as go_on:
                async with asyncio.timeout(60), opened(http, n=2) as response:
                    assert response.status_code == 200
                    lines = frames(response)
                    for index in (0, 1):
                        chunk = data(await anext(lines))
                        (choice,) = chunk["choices"]
                        assert choice["index"] == index
                        assert choice["delta"] == {"role": "assistant", "content": ""}
                        assert chunk["usage"] == {
                            "prompt_tokens": PROMPT_TOKENS,
                            "completion_tokens": 0,
                            "total_tokens": PROMPT_TOKENS,
                            "prompt_tokens_details": {"cached_tokens": 0},
                        }
                    go_on()
                    *_, last, done = [line async for line in lines]
                    assert data(last)["usage"]["completion_tokens"] == 8
                    assert done == "data: [DONE]"
            await http.server.at_rest()

    asyncio.run(main())


def test_without_a_row_the_opening_comes_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ROW_SECONDS", 0.1)

    async def main() -> None:
        async with serving(tmp_path) as http:
            with http.server.holding() as go_on:
                async with asyncio.timeout(60), opened(http) as response:
                    assert response.status_code == 200
                    lines = frames(response)
                    usage = data(await anext(lines))["usage"]
                    assert usage["prompt_tokens"] == PROMPT_TOKENS
                    assert usage["prompt_tokens_details"] is None, "nothing is known of the cache"
                    go_on()
                    assert [line async for line in lines][-1] == "data: [DONE]"
            await http.server.at_rest()

    asyncio.run(main())


def test_comments_come_until_the_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            for path, prompt in ((PATH, {}), ("/v1/completions", {"prompt": ["x", "y"]})):
                changes = {"messages": None} | prompt if prompt else {}
                monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.02)
                with http.server.holding(step=2) as go_on:
                    async with asyncio.timeout(60), opened(http, path, **changes) as response:
                        lines = frames(response)
                        found = [await anext(lines) for _ in range(4)]
                        assert found[-3:] == [COMMENT] * 3
                        monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 3600.0)
                        go_on()
                        rest = [line async for line in lines]
                        first = next(i for i, line in enumerate(rest) if line != COMMENT)
                        assert COMMENT not in rest[first:] and rest[-1] == "data: [DONE]"
            await http.server.at_rest()

    asyncio.run(main())


def test_a_client_that_leaves_before_the_first_token_ends_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.02)

    async def main() -> None:
        async with serving(tmp_path) as http:
            with http.server.holding(step=2):
                async with asyncio.timeout(60), opened(http) as response:
                    lines = frames(response)
                    while await anext(lines) != COMMENT:
                        pass
                await until(lambda: http.server.service.in_flight == 0)
            await http.server.at_rest()

    asyncio.run(main())


def test_an_error_behind_the_opening_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ROW_SECONDS", 3600.0)

    async def main() -> None:
        async with serving(tmp_path) as http:
            http.server.runner.spoils = lambda number, lane, row: True
            with http.server.holding(step=2) as go_on:
                async with asyncio.timeout(60), opened(http) as response:
                    assert response.status_code == 200
                    lines = frames(response)
                    assert data(await anext(lines))["choices"][0]["delta"]["role"] == "assistant"
                    go_on()
                    *_, last = [line async for line in lines]
                    assert data(last)["error"]["code"] == "non_finite_logits"
            await http.server.at_rest()

    asyncio.run(main())


def test_comments_come_while_a_call_is_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.0001)
    mark, call, _ = FORMS["hermes"]

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark, seconds=0.001) as http:
            says(call(ARGUMENTS))
            asked = {"messages": ASKED, "tools": [ADD], "max_tokens": 100}
            async with asyncio.timeout(60), opened(http, PATH, **asked) as response:
                lines = [line async for line in frames(response)]
            told = [i for i, line in enumerate(lines) if "tool_calls" in line]
            opening = next(i for i, line in enumerate(lines) if "assistant" in line)
            assert COMMENT in lines[opening : told[0]], "tokens came, and nothing could be told"
            await http.server.at_rest()

    asyncio.run(main())
