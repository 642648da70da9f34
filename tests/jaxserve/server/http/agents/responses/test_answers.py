"""Answers of /v1/responses, streamed and whole, to openai's client and to requests by hand."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from jaxserve.errors import EngineError
from jaxserve.server.core.limits import Limits
from tests.jaxserve.server.http.harness import Http
from tests.jaxserve.server.http.scripted_model import ARGUMENTS, FORMS, Says, speaking

pytestmark = pytest.mark.system
PATH = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": SCHEMA}
THINKS = "{{ '' if true else '<think></think>' }}"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def events(http: Http, body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each checked against the client's own types."""
    response = await http.post(PATH, body | {"stream": True})
    assert response.status_code == 200, response.text
    found = list[dict[str, Any]]()
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(found)
        EVENT.validate_python(event)
        found.append(event)
    return found


def types(found: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, each once where it is repeated."""
    names = [event["type"].removeprefix("response.") for event in found]
    return [name for name, before in zip(names, [None, *names], strict=False) if name != before]


def without_ids(item: Any) -> Any:
    """Return output without what differs between two answers to one request."""
    if isinstance(item, dict):
        return {k: without_ids(v) for k, v in item.items() if k not in ("id", "call_id")}
    return [without_ids(each) for each in item] if isinstance(item, list) else item


async def both(http: Http, body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of a request and its last response, which is that of a whole reply."""
    told = await events(http, body)
    whole = (await http.post(PATH, body)).json()
    Response.model_validate(whole)
    last = told[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert last["output"] == [
        event["item"] for event in told if event["type"] == "response.output_item.done"
    ]
    usages = [
        {**each["usage"], "input_tokens_details": None} for each in (last, whole)
    ]  # what is cached differs
    assert usages[0] == usages[1] and last["status"] == whole["status"]
    return told, last


def test_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http:
            says("It is 12.")
            told, last = await both(http, {"model": "fake", "input": "7 plus 5?"})
            assert types(told) == [
                *("created", "in_progress", "output_item.added", "content_part.added"),
                *("output_text.delta", "output_text.done", "content_part.done"),
                *("output_item.done", "completed"),
            ]
            deltas = [e["delta"] for e in told if e["type"] == "response.output_text.delta"]
            assert "".join(deltas) == "It is 12." == last["output"][0]["content"][0]["text"]
            prompt = len("user: 7 plus 5?\n")
            assert last["usage"]["input_tokens"] == prompt
            assert last["usage"]["output_tokens"] == len("It is 12.") + 1
            assert last["usage"]["total_tokens"] == prompt + 10
            answer = await http.client.responses.create(model="fake", input="7 plus 5?")
            assert answer.output_text == "It is 12." and answer.status == "completed"
            async with http.client.responses.stream(model="fake", input="7 plus 5?") as stream:
                assert (await stream.get_final_response()).output_text == "It is 12."
            await http.server.at_rest()

    asyncio.run(main())


def test_a_thought_and_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "", end=THINKS) as http:
            says("<think>8, 9, 10.</think>It is 12.")
            told, last = await both(http, {"input": "7 plus 5?"})
            assert types(told) == [
                *("created", "in_progress", "output_item.added", "content_part.added"),
                *("reasoning_text.delta", "reasoning_text.done", "content_part.done"),
                *("output_item.done", "output_item.added", "content_part.added"),
                *("output_text.delta", "output_text.done", "content_part.done"),
                *("output_item.done", "completed"),
            ]
            thought, message = last["output"]
            assert thought["content"] == [{"type": "reasoning_text", "text": "8, 9, 10."}]
            assert thought["encrypted_content"] is None and thought["summary"] == []
            assert message["content"][0]["text"] == "It is 12."
            details = last["usage"]["output_tokens_details"]
            assert details == {"reasoning_tokens": len("8, 9, 10.")}

    asyncio.run(main())


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_two_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str) -> None:
    mark, call, two = FORMS[form]

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark) as http:
            written = call(ARGUMENTS)
            says("I add.\n" + two.format(written, written))
            told, last = await both(http, {"input": "7 plus 5?", "tools": [ADD]})
            text, first, second = last["output"]
            assert text["content"][0]["text"] == "I add."
            for item in (first, second):
                assert item["name"] == "add" and item["arguments"] == ARGUMENTS
                assert item["status"] == "completed"
            assert first["call_id"] != second["call_id"]
            assert types(told)[7:11] == [
                *("output_item.done", "output_item.added"),
                *("function_call_arguments.delta", "function_call_arguments.done"),
            ]
            # The agent sends all of it back, with the results.
            says("It is 12.")
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "12"}
                for item in (first, second)
            ]
            asked = [{"role": "user", "content": "7 plus 5?"}, *last["output"], *results]
            response = await http.post(PATH, {"input": asked, "tools": [ADD]})
            assert response.json()["output"][0]["content"][0]["text"] == "It is 12."
            assert "jaxserve-ignored" not in response.headers

    asyncio.run(main())


def test_an_answer_of_its_full_length_is_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http:
            says("It is 12.")
            told, last = await both(http, {"input": "7 plus 5?", "max_output_tokens": 5})
            assert told[-1]["type"] == "response.incomplete"
            assert last["incomplete_details"] == {"reason": "max_output_tokens"}
            assert last["output"][0]["status"] == "incomplete"
            assert last["output"][0]["content"][0]["text"] == "It is"

    asyncio.run(main())


def test_an_answer_without_text_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http:
            says("")
            told, last = await both(http, {"input": ""})
            assert told[-1]["type"] == "response.completed"
            assert last["output"][0]["content"][0]["text"] == ""

    asyncio.run(main())


def test_an_error_in_the_middle_ends_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http:
            says("It is 12, as far as anybody can tell from here.")

            loop = asyncio.get_running_loop()
            lost = EngineError("the device is lost")

            def fail(step: int) -> None:
                if step == 6:
                    loop.call_soon_threadsafe(http.server.service.fail_all, lost)

            http.server.runner.hook = fail
            told = await events(http, {"input": "7 plus 5?"})
            failed = told[-1]
            assert failed["type"] == "response.failed"
            assert failed["response"]["status"] == "failed"
            assert failed["response"]["error"]["code"] == "server_error"

    asyncio.run(main())


class Sum(BaseModel):
    a: int
    b: int


def test_structured_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http:
            says('{"a":7,"b":5}')
            parsed = await http.client.responses.parse(
                model="fake", input="7 plus 5?", text_format=Sum
            )
            assert parsed.output_parsed == Sum(a=7, b=5)
            refused = await http.post(
                PATH, {"input": "", "text": {"format": {"type": "json_schema", "name": "x"}}}
            )
            assert refused.json()["error"]["param"] == "text.format.schema"

    asyncio.run(main())


def test_stored_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http:
            create = http.client.responses.create
            says("It is 12.")
            first = await create(model="fake", input="7 plus 5?", instructions="Add.")
            assert (await http.client.responses.retrieve(first.id)).output_text == "It is 12."
            items = await http.client.responses.input_items.list(first.id)
            assert [item.type for item in items.data] == ["message"]
            says("I said so.")
            second = await create(model="fake", input="Sure?", previous_response_id=first.id)
            told = "user: 7 plus 5?\nassistant: It is 12.\nuser: Sure?\n"
            assert second.usage and second.usage.input_tokens == len(told)
            await http.client.responses.delete(first.id)
            for lost in (first.id, "resp_0"):
                with pytest.raises(NotFoundError, match="is not stored here"):
                    await http.client.responses.retrieve(lost)
                response = await http.post(PATH, {"input": "", "previous_response_id": lost})
                error = response.json()["error"]
                assert error["code"] == "previous_response_not_found"
                assert error["param"] == "previous_response_id"
            third = await create(model="fake", input="And?", previous_response_id=second.id)
            assert third.usage and third.usage.input_tokens > second.usage.input_tokens
            unkept = await create(model="fake", input="7 plus 5?", store=False)
            with pytest.raises(NotFoundError):
                await http.client.responses.retrieve(unkept.id)

    asyncio.run(main())


def test_stored_items_are_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    """A client cannot have the server keep, and read again, what no model sees."""

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http:
            says("It is 12.")
            junk = {"role": "user", "content": "7 plus 5?", "id": [[]] * 100, "more": [[]] * 100}
            twins = [{"role": "user", "content": text, "id": "twin"} for text in ("And?", "Or?")]
            first = (await http.post(PATH, {"input": [junk, *twins]})).json()
            listed = (await http.raw.get(f"{PATH}/{first['id']}/input_items?order=asc")).json()
            contents = [item["content"][0]["text"] for item in listed["data"]]
            assert contents == ["7 plus 5?", "And?", "Or?"]
            assert {*listed["data"][0]} == {"type", "id", "role", "content"}
            assert len({item["id"] for item in listed["data"]}) == 3
            for limit in ("0", "101", "0001" + "0" * 5000, "x"):
                page = f"{PATH}/{first['id']}/input_items?limit={limit}"
                assert (await http.raw.get(page)).status_code == 400
            after = f"{PATH}/{first['id']}/input_items?limit=1&after={listed['data'][2]['id']}"
            page = (await http.raw.get(after)).json()
            assert page["data"] == [listed["data"][1]] and page["has_more"]

    asyncio.run(main())


def test_a_long_chain_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        limits = Limits(max_body_bytes=1400, max_input_bytes=10**6)
        async with speaking(tmp_path, monkeypatch, "", limits=limits, max_context=2048) as http:
            says("It is 12.")
            body: dict[str, Any] = {"input": "x" * 300}
            for expected in (200, 200, 200, 400):
                response = await http.post(PATH, body)
                assert response.status_code == expected, response.text
                body["previous_response_id"] = response.json().get("id")
            error = response.json()["error"]
            assert error["param"] == "previous_response_id" and "--max-body-bytes" in response.text

    asyncio.run(main())


def test_an_aborted_answer_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http:
            says("It is 12, as far as anybody can tell from here.")
            loop = asyncio.get_running_loop()

            def abort(step: int) -> None:
                if step == 6:
                    loop.call_soon_threadsafe(http.server.service.abort, "asked")

            http.server.runner.hook = abort
            told = await events(http, {"input": "7 plus 5?", "request_id": "asked"})
            assert told[-1]["type"] == "response.incomplete"
            assert told[-1]["response"]["status"] == "cancelled"

    asyncio.run(main())


def test_input_tokens_are_those_of_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, FORMS["hermes"][0]) as http:
            says("12")
            body: dict[str, Any] = {"input": "7 plus 5?", "instructions": "Add.", "tools": [ADD]}
            counted = (await http.post(f"{PATH}/input_tokens", body)).json()
            answered = (await http.post(PATH, body)).json()
            assert counted["input_tokens"] == answered["usage"]["input_tokens"]

    asyncio.run(main())
