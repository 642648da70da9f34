"""Embeddings of a real model over every protocol, compared with those of transformers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jaxserve import LLM, EngineOptions
from jaxserve.client import AsyncClient
from jaxserve.server.cards import engine_card, model_card
from jaxserve.server.core.limits import Limits
from jaxserve.server.flags import ServeOptions
from jaxserve.server.http.app import new_app
from jaxserve.server.options import AddressOptions
from jaxserve.server.process import ServerProcess
from jaxserve.server.readiness import Readiness
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.serving_state import ServingState
from jaxserve.sharding.mesh import MeshSpec
from tests.embedding_model import BOUND, END, golden, text_of, with_tokenizer
from tests.jaxserve.server.http.harness import fake_metrics

PROMPTS, EXPECTED = golden()
OTHERS = [[7], [1, 2, 3], PROMPTS[0][:9], list(range(90, 40, -1))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("embedding"))


@asynccontextmanager
async def serving(llm: LLM) -> AsyncIterator[tuple[Readiness, str]]:
    """Serve this model; yield its readiness, and its address of gRPC."""
    failures: list[BaseException] = []
    process = ServerProcess(Limits())
    service, thread = process.connector.connect_llm(llm, on_failure=failures.append)
    process.readiness.set_ready(
        ServingState(service, thread, model_card(llm, "tiny"), engine_card(llm), lambda: 0)
    )
    options = ServeOptions(addresses=AddressOptions(port=0, http=False))
    await process.listeners.start(options, process.lifecycle.drain, failures.append)
    thread.start()
    try:
        yield process.readiness, f"127.0.0.1:{process.listeners.ports['gRPC']}"
    finally:
        await process.listeners.stop(0)
        assert thread.close() and not failures
        service.close()


async def over_http(readiness: Readiness, body: dict[str, Any]) -> list[list[float]]:
    app = new_app(readiness, BearerTokens(), Limits(), fake_metrics)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost"
    ) as client:
        answer = (await client.post("/v1/embeddings", json=body)).json()
    return [entry["embedding"] for entry in answer["data"]]


def check(found: object) -> None:
    np.testing.assert_allclose(np.array(found, np.float32), EXPECTED, atol=BOUND, rtol=0)


@pytest.mark.parametrize(
    ("mesh", "step_tokens"), [((1, 1, 2), 16), ((2, 1, 1), 64)], ids=["1x1x2", "2x1x1"]
)
def test_transformers_answer(folder: Path, mesh: tuple[int, int, int], step_tokens: int) -> None:
    """Embeddings agree alone, from the prefix cache, and beside other requests and inputs."""

    async def main(llm: LLM) -> None:
        async with serving(llm) as (readiness, address), AsyncClient(address) as client:
            done = await client.embed(PROMPTS)
            check(done.embeddings)
            assert (
                done.usage.prompt_tokens == sum(map(len, PROMPTS))
                and not done.usage.cached_prompt_tokens
            )
            again = await client.embed(PROMPTS)
            check(again.embeddings)
            # Alone: beside others the lane that has the pages may be full.
            assert again.usage.cached_prompt_tokens >= 32
            again, beside, *_ = await asyncio.gather(
                client.embed(PROMPTS),
                client.embed([*OTHERS, *PROMPTS]),
                *(client.embed([each]) for each in OTHERS),
            )
            check(again.embeddings)
            check(beside.embeddings[len(OTHERS) :])
            of_text = await client.embed([text_of([5, 17]), [5, 17, END]])
            np.testing.assert_allclose(*np.array(of_text.embeddings), atol=BOUND)
            check(await over_http(readiness, {"input": PROMPTS}))
            texts = [text_of([5, 17]), text_of([8])]
            found = np.array(
                await over_http(readiness, {"input": texts, "dimensions": EXPECTED.shape[1]}),
                np.float32,
            )
            assert found.tolist() == [list(e) for e in (await client.embed(texts)).embeddings]

    options = EngineOptions(max_batch=4, page_size=4, step_tokens=step_tokens)
    with LLM(folder, options=options, mesh=MeshSpec(*mesh)) as llm:
        llm.warm_up()
        asyncio.run(main(llm))
        assert llm.runner.compiles_after_ready == 0
