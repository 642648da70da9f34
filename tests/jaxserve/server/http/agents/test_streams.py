"""Streams of both doors as they were committed, one for each way in which an answer goes.

`pytest --write-streams` writes them anew: read the difference before it is committed.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import EngineError
from tests.jaxserve.server.http.harness import Http
from tests.jaxserve.server.http.scripted_model import ARGUMENTS, FORMS, Says, speaking

pytestmark = pytest.mark.system
FOLDER = Path(__file__).parents[4] / "golden" / "agent_streams"
MARK, CALL, _ = FORMS["hermes"]
THINKS = "{{ '' if true else '<think></think>' }}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
IDS = re.compile(r"\b(?:resp|msg|rs|fc|ctc|toolu|req)_\w{8,}|(?<=\"call_id\":\")\w{9}(?=\")")
TIMES = re.compile(r'"(created_at|completed_at)":\d+')
SEALED = re.compile(r'"(encrypted_content|signature)":"[\w=-]{20,}"')
INCIDENT = re.compile(r"incident \w+")
PATHS = {"responses": "/v1/responses", "messages": "/v1/messages"}


@dataclass(frozen=True)
class Case:
    """An answer of the model, and what else the request says."""

    said: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # by door
    fails_at: int = 0  # step at which the device is lost


CASES = {
    "text": Case("It is 12."),
    "reasoning": Case("<think>8, 9, 10.</think>It is 12."),
    "sealed_reasoning": Case(
        "<think>8, 9, 10.</think>It is 12.",
        {"responses": {"include": ["reasoning.encrypted_content"]}},
    ),
    "one_call": Case("I add.\n" + CALL(ARGUMENTS)),
    "two_calls": Case(CALL(ARGUMENTS) + "\n" + CALL('{"a": 1}')),
    "custom_tool": Case(
        CALL('{"input": "a\\n\\"b\\""}').replace('"add"', '"patch"'),
        {"responses": {"tools": [{"type": "custom", "name": "patch"}]}},
    ),
    "length": Case(
        "It is 12.", {"responses": {"max_output_tokens": 5}, "messages": {"max_tokens": 5}}
    ),
    "refused": Case("", {"responses": {"temperature": 3}, "messages": {"temperature": 3}}),
    "error_in_the_middle": Case("It is 12, as far as anybody can tell from here.", fails_at=6),
}
OF_RESPONSES_ALONE = ("custom_tool", "sealed_reasoning")


def body(door: str, case: Case) -> dict[str, Any]:
    """Return the request of a case."""
    asked: dict[str, Any] = {
        "responses": {
            "input": "7 plus 5?",
            "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        },
        "messages": {
            "messages": [{"role": "user", "content": "7 plus 5?"}],
            "tools": [{"name": "add", "input_schema": SCHEMA}],
            "max_tokens": 200,
        },
    }[door]
    return {
        "model": "fake",
        "request_id": "asked",
        **asked,
        **case.fields.get(door, {}),
        "stream": True,
    }


def plain(text: str) -> str:
    """Return a stream without what differs each time: ids by their order, times and seals."""
    ids: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        prefix = match[0].partition("_")[0] if "_" in match[0] else "call"
        return ids.setdefault(match[0], f"{prefix}_{len(ids)}")

    text = INCIDENT.sub("incident 0", text)
    text = TIMES.sub(r'"\1":0', SEALED.sub(r'"\1":"sealed"', text))
    return joined(IDS.sub(numbered, text))


def joined(text: str) -> str:
    """Return a stream whose deltas of one kind that follow each other are one.

    How an answer is cut into pieces is a matter of time.
    """
    frames: list[tuple[str, dict[str, Any]]] = []
    for frame in filter(None, text.split("\n\n")):
        if not frame.startswith("event: "):
            frames.append(("", json.loads(frame)))
            continue
        name, data = frame.removeprefix("event: ").split("\ndata: ")
        event = json.loads(data)
        event.pop("sequence_number", None)
        if not (frames and frames[-1][0] == name and _add(frames[-1][1], event)):
            frames.append((name, event))
    lines = [f"{name} {json.dumps(event, ensure_ascii=False)}".lstrip() for name, event in frames]
    return "\n".join(lines) + "\n"


def _add(event: dict[str, Any], more: dict[str, Any]) -> bool:
    """Add the text of a delta to the one before it; return whether both are deltas of one kind."""
    old = event.get("delta")
    new = more.get("delta")
    if isinstance(old, str) and isinstance(new, str):
        event["delta"] = old + new
        return True
    if not (isinstance(old, dict) and isinstance(new, dict) and old.get("type") == new.get("type")):
        return False
    texts = [name for name in ("text", "thinking", "partial_json") if name in new]
    for name in texts:
        old[name] += new[name]
    return bool(texts)


async def told(http: Http, door: str, case: Case) -> str:
    """Return what a server answers."""
    loop = asyncio.get_running_loop()
    lost = EngineError("the device is lost")

    def fail(step: int) -> None:
        if step == case.fails_at:
            loop.call_soon_threadsafe(http.server.service.fail_all, lost)

    http.server.runner.hook = fail
    response = await http.post(PATHS[door], body(door, case))
    return plain(response.text)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("door", PATHS)
def test_a_stream_is_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: Says,
    pytestconfig: pytest.Config,
    door: str,
    name: str,
) -> None:
    if door == "messages" and name in OF_RESPONSES_ALONE:
        pytest.skip("Anthropic's API has no such thing")

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, MARK, end=THINKS) as http:
            says(CASES[name].said)
            stream = await told(http, door, CASES[name])
            file = FOLDER / f"{door}_{name}.txt"
            if pytestconfig.getoption("--write-streams"):
                file.write_text(stream, encoding="utf-8")
            if name == "error_in_the_middle":
                # How much was told before it is a matter of time.
                assert stream.splitlines()[-1] == file.read_text("utf-8").splitlines()[-1]
            else:
                assert stream == file.read_text("utf-8")
            await http.server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("door", PATHS)
def test_a_client_that_goes_ends_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, door: str
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, MARK) as http:
            says("It is 12, as far as anybody can tell from here. " * 8)
            asked = body(door, CASES["text"])
            with http.server.holding(step=6) as go_on:
                async with http.raw.stream("POST", PATHS[door], json=asked) as response:
                    async for line in response.aiter_lines():
                        if "delta" in line:
                            break
                go_on()
            await http.server.at_rest()

    asyncio.run(main())
