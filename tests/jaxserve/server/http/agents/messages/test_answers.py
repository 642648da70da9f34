"""Answers of /v1/messages, streamed and whole."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jaxserve.server.harness import until
from tests.jaxserve.server.http.agents.messages.asking import (
    ADD,
    ASKED,
    COUNT,
    PATH,
    THINKS,
    ask,
    both,
    events,
    refused,
    told,
)
from tests.jaxserve.server.http.harness import Http, serving
from tests.jaxserve.server.http.scripted_model import ARGUMENTS, FORMS, Says, speaking
from tests.slow_cases import slow_but

pytestmark = pytest.mark.system
THOUGHT = "7, and 5 more."


def test_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http:
            says("It is 12.")
            message = await both(http, ask(request_id="mine"))
            assert message == {
                "id": "msg_mine",
                "type": "message",
                "role": "assistant",
                "model": "fake",
                "content": [{"type": "text", "text": "It is 12."}],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {
                    "input_tokens": len("user: 7 plus 5?\n"),
                    "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": 0,
                    "output_tokens": 10,
                    "output_tokens_details": {"thinking_tokens": 0},
                },
            }
            again = await http.post(f"{PATH}?beta=true", ask(), headers={"anthropic-beta": "x"})
            usage = again.json()["usage"]
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 16
            assert again.headers["request-id"] and "jaxserve-ignored" not in again.headers
            says("")
            assert (await both(http, ask()))["content"] == []
            await http.server.at_rest()

    asyncio.run(main())


def test_thoughts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "", end=THINKS) as http:
            says(f"<think>\n{THOUGHT}\n</think>\n\nIt is 12.")
            message = await both(http, ask())
            thought, text = message["content"]
            assert (thought["type"], thought["thinking"]) == ("thinking", THOUGHT)
            assert text == {"type": "text", "text": "It is 12."}
            assert message["usage"]["output_tokens_details"] == {"thinking_tokens": len(THOUGHT)}
            # It goes back as it came; another text with its signature does not.
            later = [*ASKED, {"role": "assistant", "content": message["content"]}, *ASKED]
            assert (await http.post(PATH, ask(messages=later))).status_code == 200
            thought["thinking"] += " Or 13."
            error = await refused(http, ask(messages=later))
            assert error == (
                "messages[1].content[0].signature is not a signature of this text; send the block "
                "as it came, or leave out its signature"
            )
            thought["signature"] = ""
            assert (await http.post(PATH, ask(messages=later))).status_code == 200

    asyncio.run(main())


def test_thoughts_without_their_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    async def main() -> None:
        reads = "{{ messages[-2].reasoning_content if messages | length > 1 }}" + THINKS
        async with speaking(tmp_path, monkeypatch, "", end=reads) as http:
            says(f"<think>\n{THOUGHT}\n</think>\n\nIt is 12.")
            body = ask(thinking={"type": "adaptive", "display": "omitted"})
            thought, text = told(await events(http, body))["content"]
            assert thought["thinking"] == "" and text["text"] == "It is 12."
            assert THOUGHT not in thought["signature"]
            whole = (await http.post(PATH, body)).json()["content"]
            assert whole[0]["thinking"] == "" and whole[1] == text

            async def count(block: dict[str, Any]) -> int:
                content = [block, text]
                messages = [*ASKED, {"role": "assistant", "content": content}, *ASKED]
                response = await http.post(COUNT, {"messages": messages})
                return response.json()["input_tokens"]

            shown = await count({"type": "thinking", "thinking": THOUGHT})
            assert await count(thought) == await count(whole[0]) == shown
            assert await count({"type": "thinking", "thinking": ""}) == shown - len(THOUGHT)

    asyncio.run(main())


@pytest.mark.parametrize("form", slow_but(list(FORMS), ["llama", "mistral", "glm45"]))
def test_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says, form: str) -> None:
    mark, call, two = FORMS[form]
    both_calls = two.format(call(ARGUMENTS), call(ARGUMENTS).replace("<|python_tag|>", ""))

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark) as http:
            says("I add.\n" + call(ARGUMENTS))
            message = await both(http, ask(tools=[ADD]))
            text, made = message["content"]
            assert text["text"].strip() == "I add." and message["stop_reason"] == "tool_use"
            assert re.fullmatch(r"toolu_([A-Za-z0-9]{9}|functions\.add:0)", made["id"])
            assert made == {
                "type": "tool_use",
                "id": made["id"],
                "name": "add",
                "input": {"a": 7, "b": 5},
            }
            says(both_calls)
            long = ask(tools=[ADD], max_tokens=400)
            message = await both(http, long)
            assert [block["type"] for block in message["content"]] == ["tool_use"] * 2
            assert len({block["id"] for block in message["content"]}) == 2
            one = {"type": "auto", "disable_parallel_tool_use": True}
            message = await both(http, long | {"tool_choice": one})
            assert len(message["content"]) == 1

    asyncio.run(main())


def test_odd_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    mark, call, _ = FORMS["hermes"]
    odd = r'{"a": "\ud83d", "b": 1e999, "c": -1e999, "d": 25000000000000000000000}'

    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, mark) as http:
            says(call(odd))
            response = await http.post(PATH, ask(tools=[ADD]))
            (made,) = response.json()["content"]
            assert made["input"]["a"] == "\ufffd" and made["input"]["b"] == -made["input"]["c"]
            assert made["input"]["b"] > 1e308 and made["input"]["d"] == 25 * 10**21
            # It goes back as it came.
            result = {"type": "tool_result", "tool_use_id": made["id"], "content": "12"}
            later = [
                *ASKED,
                {"role": "assistant", "content": [made]},
                {"role": "user", "content": [result]},
            ]
            counted = await http.raw.post(
                COUNT,
                content=json.dumps(ask(messages=later, tools=[ADD])),
                headers={"content-type": "application/json"},
            )
            assert counted.status_code == 200, counted.text
            *found, last = await events(http, ask(tools=[ADD]))
            assert last["type"] == "message_stop"
            pieces = [e["delta"]["partial_json"] for e in found if "partial_json" in str(e)]
            assert json.loads("".join(pieces)) == made["input"]

    asyncio.run(main())


def test_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    async def main() -> None:
        async with speaking(tmp_path, monkeypatch, "") as http:
            says("It is 12, I think.")

            async def end(**fields: Any) -> tuple[str, str | None, str]:
                message = await both(http, ask(**fields))
                (block,) = message["content"]
                return message["stop_reason"], message["stop_sequence"], block["text"]

            assert await end(max_tokens=5) == ("max_tokens", None, "It is")
            found = await end(stop_sequences=[" I", ","])
            assert found == ("stop_sequence", ",", "It is 12")
            assert await end(stop=[","]) == found
            assert (await end(stop_token_ids=[ord(",")]))[0] == "end_turn"
            says("x" * 600)
            reason, _, text = await end(max_tokens=32000)
            assert reason == "model_context_window_exceeded"
            assert len(text) == 512 - len("user: 7 plus 5?\n")
            error = await refused(http, ask(stop_sequences=["a"] * 17))
            assert error.startswith("stop_sequences has 17 strings")
            assert (await refused(http, ask(max_tokens=0))).startswith("max_tokens is 0")

    asyncio.run(main())


def test_errors(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.005, token="secret") as http:
            endless = ask(max_tokens=300, ignore_eos=True)
            http.server.runner.spoils = spoils_after(http, 20)
            *_, last = await events(http, endless | {"request_id": "mine"})
            assert (last["type"], last["request_id"]) == ("error", "mine")
            assert last["error"]["type"] == "api_error"
            http.server.runner.spoils = spoils_after(http, 20)
            response = await http.post(PATH, endless | {"request_id": "mine"})
            assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")
            error = await refused(http, ask(messages=[{"role": "user", "content": "x" * 600}]))
            assert re.match(r"prompt is too long: \d+ tokens > \d+ maximum \(", error)
            response = await http.post(PATH, ask(model="claude-opus-4-8"))
            assert (response.status_code, response.json()["error"]["type"]) == (
                404,
                "not_found_error",
            )
            await http.server.at_rest()

    asyncio.run(main())


def spoils_after(http: Http, steps: int) -> Callable[[int, int, int], bool]:
    """Make the device's first row not finite once, after this number of steps."""
    when = http.server.runner.steps + steps
    return lambda number, lane, row: number == when and row == 0


def test_an_operator_aborts(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, seconds=0.005) as http:
            for post in (events, http.raw.post):
                body = ask(max_tokens=400, ignore_eos=True, request_id="mine")
                request = events(http, body) if post is events else http.raw.post(PATH, json=body)
                task = asyncio.ensure_future(request)
                await until(lambda: http.server.service.in_flight)
                await until(lambda: http.server.service.abort("mine"))
                answer: Any = await task
                message = told(answer) if post is events else answer.json()
                assert message["stop_reason"] == "end_turn"
            await http.server.at_rest()

    asyncio.run(main())


def test_a_server_that_loads(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, opened=False) as http:
            for path in (PATH, COUNT):
                response = await http.post(path, ask())
                assert (response.status_code, response.json()["error"]["type"]) == (
                    529,
                    "overloaded_error",
                )

    asyncio.run(main())
