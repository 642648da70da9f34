"""Fields of HTTP answers, which no model describes: what a server over the fake device answers."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import httpx

from jaxserve.server.core.limits import Limits
from jaxserve.server.http.app import new_app
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.serving_state import StepUse
from tests import fake_model
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.engine.host.driver import EagerProposer
from tests.jaxserve.server import harness
from tests.jaxserve.server.http.harness import add_alternatives

Body = Mapping[str, Any]
Told = tuple[str, Any]  # path and way of asking, and the answer
# The model thinks, says and calls; before the harness's chat template stand the marks of all that.
MARKS = "{{ tools | tojson if tools else '<tool_call> <think> </think>' }}"
ANSWER = '<think>hm</think>Yes.\n<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ASKED = [{"role": "user", "content": "7 + 5?"}]
CHAT = {"messages": ASKED, "tools": [TOOL], "logprobs": True, "top_logprobs": 2}
TEXT = {"prompt": "7 + 5 = ", "max_tokens": 8, "logprobs": 2, "echo": True}
ADD = {"name": "add", "parameters": {"type": "object"}}
RESPONSES = {
    "input": "7 + 5?",
    "tools": [{"type": "function", **ADD}],
    "include": ["reasoning.encrypted_content"],
}
MESSAGES = {
    "messages": ASKED,
    "max_tokens": 400,
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
}
SCORES = {"prompt_logprobs": 1}  # of whole answers only
STEP = StepUse("decode", rows=1, tokens=1, steps=1, launches=1, live_tokens=1, computed_tokens=1)

# Objects whose keys are data: tokens, axes, metrics and their labels.
LOGPROBS = r"choices\[\]\.logprobs\.top_logprobs\[\]|(.*\.)?prompt_logprobs\[\]"
BY_DATA = re.compile(LOGPROBS + r"|engine\.mesh|metrics(\.\*)*")
NUMBER = "number"
KINDS = {bool: "boolean", int: NUMBER, float: NUMBER, str: "string", list: "list", dict: "object"}


def fields() -> dict[str, str]:
    """What is at the end of each path; null where there was never anything else."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, value in asyncio.run(_everything()):
        for path, kind in _leaves(value):
            found[f"{name} {path}"].add(kind)
    ends = [name for name in found if not any(_is_inside(other, name) for other in found)]
    return {name: " or ".join(sorted(found[name] - {"null"}) or ["null"]) for name in ends}


def _is_inside(name: str, outer: str) -> bool:
    return name.startswith((f"{outer}.", f"{outer}["))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            name = "*" if BY_DATA.fullmatch(path) else key
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _leaves(inner, f"{path}[]")
    else:
        yield path, KINDS.get(type(value), "null")


async def _everything() -> list[Told]:
    async with _client(proposer=EagerProposer()) as (client, server):
        add_alternatives(server)
        with _saying(ANSWER):
            told = [
                await _post(client, "/v1/chat/completions", CHAT | SCORES),
                *await _stream(client, "/v1/chat/completions", CHAT | STREAM),
                await _post(client, "/v1/completions", TEXT | SCORES),
                *await _stream(client, "/v1/completions", TEXT | STREAM),
                await _post(client, "/v1/responses", RESPONSES),
                *await _stream(client, "/v1/responses", RESPONSES | {"stream": True}),
                await _post(client, "/v1/messages", MESSAGES),
                *await _stream(client, "/v1/messages", MESSAGES | {"stream": True}),
            ]
        told += [
            await _post(client, "/tokenize", {"prompt": "7"}),
            await _post(client, "/detokenize", {"tokens": [55]}),
            await _post(client, "/v1/responses/input_tokens", {"input": "7"}),
            await _post(client, "/v1/messages/count_tokens", {"messages": ASKED}),
            ("any refusal", (await client.post("/tokenize", json={})).json()),
            ("any refusal of messages", (await client.post("/v1/messages", json={})).json()),
        ]
        for path in ("/health", "/version", "/v1/models", "/v1/models/fake"):
            told.append((path, (await client.get(path)).json()))
        server.readiness.state = replace(server.served, steps=lambda: [STEP])
        server.readiness.set_draining()  # which ends the live view
        told += _events("/live", await client.get("/live"))
    async with _client(embeds=True) as (client, _):
        told.append(await _post(client, "/v1/embeddings", {"input": "7"}))
    return told


@asynccontextmanager
async def _client(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, harness.Running]]:
    """A client without a socket. options: of `running`."""
    metrics = Metrics(lambda: 0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        stack.enter_context(patch.object(harness, "TEMPLATE", MARKS + harness.TEMPLATE))
        async with harness.running(folder, observers=(metrics,), **options) as server:
            app = new_app(
                server.readiness, BearerTokens(), Limits(), metrics.text, metrics.families
            )
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                yield client, server


def _saying(text: str) -> Any:
    """The device answers every prompt so."""
    script = [*text.encode(), *ByteTokenizer.eos_ids]

    def choose(rules: fake_model.Rules, total: int, position: int, *_: object) -> int:
        return script[min(position - rules.end_after, len(script) - 1)]

    return patch.object(fake_model.Rules, "choose", choose)


async def _post(client: httpx.AsyncClient, path: str, body: Body) -> Told:
    return path, (await client.post(path, json=body)).json()


async def _stream(client: httpx.AsyncClient, path: str, body: Body) -> list[Told]:
    return _events(f"{path} (stream)", await client.post(path, json=body))


def _events(name: str, response: httpx.Response) -> list[Told]:
    if response.status_code != 200:
        return [(name, response.json())]
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    told = [line.removeprefix("data: ") for line in lines]
    return [(name, json.loads(line)) for line in told if line != "[DONE]"]
