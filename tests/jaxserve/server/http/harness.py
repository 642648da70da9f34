"""HTTP endpoints over a socket, on the fake device, with real clients."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from prometheus_client.metrics_core import Metric
from uvicorn import Server

from jaxserve.engine.events import Logprob
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.server.http.connection import Connection
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.security.auth import BearerTokens
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_model import VOCAB, naive
from tests.jaxserve.engine.host.driver import request as engine_request
from tests.jaxserve.server.harness import Running, running

TEXT = "The quick brown fox"
EMBEDDING = {"input": "canary", "request_id": "canary"}
# Knows no certificates, which take 25 ms to read for each client.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
CANARY = {"prompt": "canary", "max_tokens": 3, "seed": 7, "logprobs": 3, "request_id": "canary"}


async def fake_metrics() -> bytes:
    return b"fake_metric 1\n"


class FakeMetrics(Metrics):
    """Metrics that show the same at any time."""

    async def text(self) -> bytes:
        return await fake_metrics()

    def families(self) -> list[Metric]:
        return []


@dataclass
class Http:
    """A server and its clients: `raw` for requests by hand, `client` OpenAI's."""

    server: Running
    uvicorn: Server
    base: str
    raw: httpx.AsyncClient
    client: AsyncOpenAI

    @property
    def open_connections(self) -> list[Connection]:
        http = self.server.process.listeners._http
        assert http
        return http._connections.all

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.raw.post(path, json=body, **options)

    async def events(self, path: str, body: Any) -> list[Any]:
        """Return the parsed events of a stream; [DONE] stays a string."""
        response = await self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *parts, rest = response.text.split("\n\n")
        assert rest == "" and all(part.startswith("data: ") for part in parts)
        return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]

    async def canary(self) -> bytes:
        """Return a whole reply without its time and its count of cached tokens."""
        embeds = self.server.service.prompts.embeds
        response = await (
            self.post("/v1/embeddings", EMBEDDING)
            if embeds
            else self.post("/v1/completions", CANARY)
        )
        assert response.status_code == 200, response.text
        return re.sub(rb'"(created|cached_tokens)":\d+', b"", response.content)


@asynccontextmanager
async def serving(
    folder: Path,
    *,
    tops: bool = False,
    token: str | None = None,
    metrics: Metrics | None = None,
    **options: Any,
) -> AsyncIterator[Http]:
    """tops: the device has alternatives to its tokens. metrics: in place of fake ones. options: of
    `running`.
    """
    if metrics:
        options["observers"] = (*options.get("observers", ()), metrics)
    tokens = BearerTokens((token,) if token else ())
    async with running(
        folder,
        http=True,
        tokens=tokens,
        new_metrics=lambda *functions: metrics or FakeMetrics(*functions),
        **options,
    ) as server:
        if tops:
            add_alternatives(server)
        uvicorn = uvicorn_of(server)
        while not uvicorn.started:
            await asyncio.sleep(0.001)
        base = f"http://127.0.0.1:{server.process.listeners.ports['HTTP']}"
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            async with (
                httpx.AsyncClient(
                    base_url=base, headers=headers, trust_env=False, timeout=60, verify=NO_TLS
                ) as raw,
                AsyncOpenAI(
                    base_url=f"{base}/v1",
                    api_key=token or "none",
                    max_retries=0,
                    timeout=60,
                    http_client=DefaultAsyncHttpxClient(verify=NO_TLS),
                ) as client,
            ):
                yield Http(server, uvicorn, base, raw, client)
        finally:
            await server.stop(1)


def uvicorn_of(server: Running) -> Server:
    """Return the library's server of a process that serves HTTP."""
    http = server.process.listeners._http
    assert http
    return http._server


def add_alternatives(server: Running) -> None:
    """Make every chosen token the most probable; token + 1, token + 2, ... follow in order."""
    collect = server.runner.collect

    def collected(plan: StepPlan, handle: StepOutput) -> StepOutput:
        output = collect(plan, handle)
        for lane in output.lanes:
            if lane.logprobs:
                lane.logprobs = [
                    [with_alternatives(entry) for entry in chunk] for chunk in lane.logprobs
                ]
            if lane.prompt_logprobs:
                lane.prompt_logprobs = [with_alternatives(entry) for entry in lane.prompt_logprobs]
        return output

    server.runner.collect = collected  # type: ignore[method-assign]


def with_alternatives(entry: Logprob) -> Logprob:
    return replace(
        entry, top=tuple(((entry.token + i) % VOCAB, entry.logprob - i) for i in range(20))
    )


def expected(prompt: str | Sequence[int] = TEXT, n: int = 8, index: int = 0) -> str:
    """Compute the fake device's answer with seed 1 by its arithmetic over a plain list."""
    ids = ByteTokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    return ByteTokenizer().decode(
        naive(engine_request(prompt=tuple(ids), max_tokens=n), index, 1, n)
    )
