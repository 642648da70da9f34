"""Requests over HTTP whose status and stream are checked."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from benchmarks.soak.outcomes import UnexpectedError
from benchmarks.soak.target import Target

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
Body = dict[str, Any]


def check(response: httpx.Response, text: str, *statuses: int) -> None:
    if response.status_code not in statuses:
        where = f"{response.request.method} {response.request.url.path}"
        raise UnexpectedError(f"{where} {response.status_code}", text)


async def post(target: Target, path: str, body: Body) -> Body:
    """Return the JSON of an answer, whose status has to be 200."""
    response = await target.http.post(path, json=body)
    check(response, response.text, 200)
    return response.json()


async def events(response: httpx.Response) -> AsyncIterator[Body]:
    """Yield the events of a stream, which has to have status 200 and to end with [DONE]."""
    if response.status_code != 200:
        check(response, (await response.aread()).decode("utf-8", "replace"), 200)
    done = False
    async for line in response.aiter_lines():
        if done and line:
            raise UnexpectedError("stream goes on behind [DONE]", line)
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise UnexpectedError(f"stream's error {event['error'].get('code')}", line)
            yield event
    if not done:
        raise UnexpectedError("stream without [DONE]")


async def streamed(target: Target, path: str, body: Body) -> list[Body]:
    """Return all events of a stream."""
    given = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with target.http.stream("POST", path, json=given) as response:
        return [event async for event in events(response)]


async def message_of(target: Target, body: Body, stream: bool) -> Body:
    """Ask for the first choice of a conversation, whole or streamed.

    Returns:
        content, tool_calls (a list of names and arguments) and finish_reason.
    """
    if not stream:
        choice = (await post(target, CHAT, body))["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        reason = choice["finish_reason"]
        return {"content": message["content"], "tool_calls": calls, "finish_reason": reason}
    joined: Body = {"content": "", "tool_calls": [], "finish_reason": None}
    for event in await streamed(target, CHAT, body):
        for choice in event["choices"]:
            _join(joined, choice)
    return joined


def _join(joined: Body, choice: Body) -> None:
    delta = choice["delta"]
    joined["content"] += delta.get("content") or ""
    joined["finish_reason"] = choice["finish_reason"] or joined["finish_reason"]
    for part in delta.get("tool_calls") or []:
        if part["index"] == len(joined["tool_calls"]):
            joined["tool_calls"].append({"name": "", "arguments": ""})
        call = joined["tool_calls"][part["index"]]
        call["name"] += part["function"].get("name") or ""
        call["arguments"] += part["function"].get("arguments") or ""
