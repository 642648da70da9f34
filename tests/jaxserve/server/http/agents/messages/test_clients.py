"""Anthropic's own client, unmodified, and requests that agents were seen to send."""

import asyncio
from pathlib import Path
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from jaxserve.server.core.limits import Limits
from tests.jaxserve.server.http.agents.messages.asking import (
    ADD,
    ASKED,
    LARGE,
    THINKS,
    both,
    refused,
)
from tests.jaxserve.server.http.agents.recorded import filled, recordings
from tests.jaxserve.server.http.harness import Http, serving
from tests.jaxserve.server.http.scripted_model import ARGUMENTS, FORMS, Says, speaking

pytestmark = pytest.mark.system
THOUGHT = "<think>\n7, and 5 more.\n</think>\n\n"


def client_of(http: Http, **options: Any) -> anthropic.AsyncAnthropic:
    options = {"api_key": "none", "max_retries": 0, "timeout": 60.0} | options
    return anthropic.AsyncAnthropic(base_url=http.base, **options)


def test_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    mark, call, _ = FORMS["hermes"]

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark, end=THINKS) as http, client_of(http) as ai:
            says(THOUGHT + call(ARGUMENTS), "It is 12.")
            asked: Any = {"model": "fake", "max_tokens": 200, "tools": [ADD]}
            first = await ai.messages.create(**asked, messages=ASKED)
            thought, made = first.content
            assert thought.type == "thinking" and thought.thinking == "7, and 5 more."
            assert made.type == "tool_use" and made.input == {"a": 7, "b": 5}
            result: Any = {"type": "tool_result", "tool_use_id": made.id, "content": "12"}
            history: list[Any] = [
                *ASKED,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result]},
            ]
            async with ai.messages.stream(**asked, messages=history) as stream:
                told = "".join([text async for text in stream.text_stream])
                last = await stream.get_final_message()
            assert told == "It is 12." and last.stop_reason == "end_turn"
            assert [block.type for block in last.content] == ["text"]
            count = await ai.messages.count_tokens(model="fake", messages=history, tools=[ADD])
            cached = last.usage.cache_read_input_tokens or 0
            assert count.input_tokens == last.usage.input_tokens + cached
            of_beta = await ai.beta.messages.create(
                **asked,
                messages=history,
                betas=["context-management-2025-06-27"],
                context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
            )
            assert of_beta.content[0].type == "text"
            with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
                image: Any = {"type": "image", "source": {"type": "url", "url": "x"}}
                await ai.messages.create(**asked, messages=[{"role": "user", "content": [image]}])
            with pytest.raises(anthropic.NotFoundError):
                await ai.messages.create(**asked | {"model": "claude"}, messages=ASKED)
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
                long: Any = [{"role": "user", "content": "x" * 600}]
                await ai.messages.create(**asked, messages=long)

    asyncio.run(main())


class Sum(BaseModel):
    """What the answer is to hold."""

    sum: int


def test_structured_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http, client_of(http) as ai:
            says('{"sum": 12}')
            parsed = await ai.messages.parse(
                model="fake", max_tokens=100, messages=ASKED, output_format=Sum
            )
            assert parsed.parsed_output == Sum(sum=12)

    asyncio.run(main())


def test_keys(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, token="secret") as http:
            asked: Any = {"model": "fake", "max_tokens": 2, "messages": ASKED}
            for key in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
                async with client_of(http, **key) as ai:
                    assert (await ai.messages.create(**asked)).usage.output_tokens == 2
            async with client_of(http, api_key="other") as ai:
                with pytest.raises(anthropic.AuthenticationError):
                    await ai.messages.create(**asked)

    asyncio.run(main())


# Long ones whose kinds of blocks and tools others have.
SLOW = (
    *("claude_2.1.197_03", "claude_2.1.197_more_07", "claude_2.1.197_more_12"),
    "claude_2.1.197_apikey_16",
)


@pytest.mark.parametrize(
    "recorded", [*recordings("claude_", SLOW), *recordings("opencode_providers_04")]
)
def test_what_agents_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, recorded: dict[str, Any]
) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"limits": Limits(), **LARGE}
        async with speaking(tmp_path, monkeypatch, "<tool_call>", end=THINKS, **options) as http:
            says('{"title": "12"}')
            body = filled(recorded["body"]) | {"model": "fake"}
            sent = str(recorded["body"])
            if "'type': 'image'" in sent:
                error = await refused(http, body)
                assert error.startswith('messages[3].content[0].content[0].type is "image"')
            elif "count_tokens" in recorded["path"]:
                response = await http.post(recorded["path"], body)
                assert response.status_code == 200 and response.json()["input_tokens"] > 100
            else:
                message = await both(http, body | {"stream": False})
                assert message["content"] == [{"type": "text", "text": '{"title": "12"}'}]

    asyncio.run(main())
