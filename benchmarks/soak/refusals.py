"""Bad requests over HTTP, each with the status that it has to get."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.http_calls import CHAT, COMPLETIONS, check
from benchmarks.soak.target import Action, Target

JSON = {"content-type": "application/json"}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}]}
TOOL = {"type": "function", "function": {"name": "add"}}
OBJECT = {"response_format": {"type": "json_object"}}


@dataclass(frozen=True)
class Bad:
    """A request that is refused.

    Attributes:
        content: The body; an object is written as JSON.
    """

    status: int
    content: bytes | dict[str, Any] = b"{}"
    path: str = COMPLETIONS
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"

    async def send(self, target: Target) -> None:
        content = self.content
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        response = await target.http.request(
            self.method, self.path, content=content, headers=JSON | self.headers
        )
        check(response, response.text + repr(self)[:200], self.status)
        target.outcomes.refused += 1


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"name": "thing", "schema": schema}
    return {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": form}}


GENERATION = (
    Bad(400, b"{"),
    Bad(400, b"[]"),
    Bad(400, b"\xff\xfe"),
    Bad(400, b'{"prompt": "a", "\\ud800": 1}'),
    Bad(400, {"prompt": "a", "bogus": 1}),
    Bad(400, {"prompt": "a", "max_tokens": -1}),
    Bad(400, {"prompt": "a", "temperature": 9}),
    Bad(400, {"prompt": "a", "n": 17}),
    Bad(400, {"prompt": ["a"] * 65}),
    Bad(400, {"prompt": "x" * 20_000}),
    Bad(400, {"prompt": [10**6]}),
    Bad(404, {"prompt": "a", "model": "gpt-4"}),
    Bad(400, schema_of({"not": {}})),
    Bad(400, {"prompt": "a", "response_format": {"type": "regex", "regex": "("}}),
    Bad(400, ASKED | OBJECT | {"tools": [TOOL], "tool_choice": "required"}, CHAT),
    Bad(400, ASKED | {"tools": [TOOL], "tool_choice": "sometimes"}, CHAT),
    Bad(400, ASKED | {"tool_choice": "required"}, CHAT),
    Bad(400, {"messages": []}, CHAT),
    Bad(400, {"input": "a"}, "/v1/embeddings"),
    Bad(400, {"tokens": [10**6]}, "/detokenize"),
    Bad(415, {"prompt": "a"}, headers={"content-type": "text/plain"}),
    Bad(415, {"prompt": "a"}, headers={"content-encoding": "gzip"}),
    Bad(421, {"prompt": "a"}, headers={"host": "evil.example"}),
    Bad(431, {"prompt": "a"}, headers={"x-long": "a" * 20_000}),
    Bad(400, {"prompt": "a"}, headers={"x-request-timeout": "soon"}),
    Bad(404, {}, "/v1/nothing"),
    Bad(404, b"", "/v1/models/gpt-4", method="GET"),
    Bad(405, b"", method="GET"),
)
EMBEDDINGS = (
    Bad(400, {"input": []}, "/v1/embeddings"),
    Bad(400, {"input": [[]]}, "/v1/embeddings"),
    Bad(400, {"input": [10**6]}, "/v1/embeddings"),
    Bad(400, {"input": "w1 " * 500}, "/v1/embeddings"),
    Bad(400, {"input": "w1", "dimensions": 7}, "/v1/embeddings"),
    Bad(400, {"input": "w1", "encoding_format": "hex"}, "/v1/embeddings"),
    Bad(404, {"input": "w1", "model": "gpt-4"}, "/v1/embeddings"),
    Bad(400, {"prompt": "w1"}),
)


async def bad_generation(target: Target, dice: random.Random) -> None:
    for bad in dice.sample(GENERATION, len(GENERATION)):
        await bad.send(target)


async def bad_embeddings(target: Target, dice: random.Random) -> None:
    for bad in dice.sample(EMBEDDINGS, len(EMBEDDINGS)):
        await bad.send(target)


FOR_GENERATION: tuple[Action, ...] = (bad_generation,)
FOR_EMBEDDINGS: tuple[Action, ...] = (bad_embeddings,)
