"""Programs that drive a model by other people's SDKs, unmodified: openai-agents, Anthropic's."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from anthropic import AsyncAnthropic, beta_async_tool
from pydantic import BaseModel

from tests.jaxserve.server.http.harness import Http
from tests.jaxserve.server.http.scripted_model import ARGUMENTS, FORMS, Says, speaking

pytestmark = pytest.mark.system
MARK, CALL, _ = FORMS["hermes"]
SIZES = {"max_context": 4096, "num_pages": 1024}
set_tracing_disabled(True)


class Sum(BaseModel):
    total: int


def agent(http: Http, **fields: Any) -> Agent:
    """Return an agent of the server's model; openai-agents speaks responses by default."""
    asked: list[tuple[int, int]] = []

    @function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        asked.append((a, b))
        return str(a + b)

    model = OpenAIResponsesModel(model="fake", openai_client=http.client)
    settings = ModelSettings(store=False)
    return Agent(name="sums", model=model, tools=[add], model_settings=settings, **fields)


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_openai(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, streams: bool
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, MARK, **SIZES) as http:
            says(CALL(ARGUMENTS), "It is 12.")
            if streams:
                running = Runner.run_streamed(agent(http), "7 plus 5?")
                kinds = [event.type async for event in running.stream_events()]
                assert "run_item_stream_event" in kinds
                assert running.final_output == "It is 12."
            else:
                result = await Runner.run(agent(http), "7 plus 5?")
                assert result.final_output == "It is 12."
            await http.server.at_rest()

    asyncio.run(main())


def test_an_agent_whose_answer_has_a_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, MARK, **SIZES) as http:
            says(CALL(ARGUMENTS), '{"total":12}')
            result = await Runner.run(agent(http, output_type=Sum), "7 plus 5?")
            assert result.final_output == Sum(total=12)
            await http.server.at_rest()

    asyncio.run(main())


def test_the_tool_runner_of_anthropic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    """It asks for a thread of messages first, and sends all of them where there is none."""

    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, MARK, **SIZES) as http:
            says(CALL(ARGUMENTS), "It is 12.")
            async with AsyncAnthropic(
                base_url=http.base, api_key="none", max_retries=0, timeout=60
            ) as client:
                runner = client.beta.messages.tool_runner(
                    model="fake",
                    max_tokens=500,
                    tools=[add],
                    messages=[{"role": "user", "content": "7 plus 5?"}],
                )
                message = await runner.until_done()
                assert message.content[0].type == "text"
                assert message.content[0].text == "It is 12."
            await http.server.at_rest()

    asyncio.run(main())
