"""Requests to /v1/messages, and the message that the events of a stream tell."""

import json
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.jaxserve.server.http.harness import Http

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
ASKED: list[Any] = [{"role": "user", "content": "7 plus 5?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"name": "add", "description": "a + b", "input_schema": SCHEMA}
THINKS = "{{ '' if true else '<think></think>' }}"  # end of a template of a model that thinks
LARGE = {"max_context": 65536, "num_pages": 16384, "step_tokens": 8192}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CALL = {"type": "tool_use", "id": "toolu_a1B2c3D4e", "name": "add", "input": {"a": 7, "b": 5}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_a1B2c3D4e", "content": "12"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}
HIDDEN = {"type": "redacted_thinking", "data": "abc"}
PICTURE = {"type": "image", "source": {"type": "url", "url": "x"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
HINT = {"cache_control": {"type": "ephemeral"}}
Events = list[dict[str, Any]]


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def answer(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": ASKED, "max_tokens": 200, **fields}


async def events(http: Http, body: Any) -> Events:
    """Return the events of a stream, each checked against the client's own types."""
    response = await http.post(PATH, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    found = Events()
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
        found.append(event)
    return found


def told(found: Events) -> dict[str, Any]:
    """Return the message that events tell, put together as Anthropic's clients do it."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    ended = 0
    for event in found:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"]) == ended, "one after another"
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block = message["content"][event["index"]]
                match event["delta"]:
                    case {"type": "text_delta", "text": text}:
                        block["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        block["thinking"] += text
                    case {"type": "signature_delta", "signature": text}:
                        block["signature"] = text
                    case {"type": "input_json_delta", "partial_json": text}:
                        inputs[event["index"]] = inputs.get(event["index"], "") + text
                        block["input"] = json.loads(inputs[event["index"]])
            case "content_block_stop":
                assert event["index"] == ended
                ended += 1
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert ended == len(message["content"])
    return message


async def both(http: Http, body: Any) -> dict[str, Any]:
    """Return the message of a whole reply, which is that of a stream."""
    response = await http.post(PATH, body)
    assert response.status_code == 200, response.text
    whole = response.json()
    Message.model_validate(whole)
    found = await events(http, body)
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    assert _comparable(told(found)) == _comparable(whole)
    return whole


def _comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without its ids, and without telling apart what was cached."""
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return message | {
        "id": "",
        "content": content,
        "usage": [prompt, usage["output_tokens"], usage["output_tokens_details"]],
    }


async def refused(http: Http, body: Any, path: str = PATH) -> str:
    """Return the text of the error that a body is refused with."""
    response = await http.post(path, body)
    assert response.status_code == 400, response.text
    found = response.json()
    assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
    assert found["request_id"] == response.headers["request-id"]
    return found["error"]["message"]
