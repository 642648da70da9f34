"""Options of jaxserve.v1 that work by the chat template."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from grpc import aio

from jaxserve.chat import TemplateOptions
from jaxserve.chat.template_options import MAX_VARIABLES_BYTES
from jaxserve.errors import RequestError
from jaxserve.server.core.ignored_names import nameable
from jaxserve.server.core.limits import Limits
from jaxserve.server.grpc.parse import parse_request, parse_tokenize_input
from jaxserve.v1 import common_pb2
from jaxserve.v1 import inference_pb2 as pb
from tests.jaxserve.server import harness
from tests.jaxserve.server.harness import running
from tests.jaxserve.server.test_bounds import violation

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
# As Qwen3's template has it.
THINKS = harness.TEMPLATE + (
    "{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)


def of_call(kind: type[pb.ChatRequest | pb.ChatStreamRequest], given: Any) -> TemplateOptions:
    message = json_format.ParseDict({"messages": MESSAGES} | given, kind())
    return parse_request(kind.FromString(message.SerializeToString()), Limits(), {}).options


def of_tokenize(given: Any) -> TemplateOptions:
    message = pb.TokenizeRequest()
    json_format.ParseDict({"conversation": {"messages": MESSAGES} | given}, message)
    prompt, path, options = parse_tokenize_input(message)
    assert (prompt, path) == (MESSAGES, "conversation.messages")
    return options


PLACES: dict[str, tuple[Callable[[Any], TemplateOptions], str]] = {
    "Chat": (lambda given: of_call(pb.ChatRequest, given), ""),
    "ChatStream": (lambda given: of_call(pb.ChatStreamRequest, given), ""),
    "Tokenize": (of_tokenize, "conversation."),
}
everywhere = pytest.mark.parametrize("place", PLACES)


@everywhere
@pytest.mark.parametrize(
    ("name", "sent", "expected"),
    [
        ("reasoning_effort", "none", "none"),
        ("enable_thinking", False, False),
        ("enable_thinking", True, True),
        ("thinking_budget", 7, 7),
        ("verbosity", "low", "low"),
        ("chat_template_kwargs", '{"tone": [1, null, "é"]}', {"tone": [1, None, "é"]}),
        ("chat_template_kwargs", "{}", {}),
        ("chat_template_kwargs", "", {}),
    ],
)
def test_each_option_alone(place: str, name: str, sent: Any, expected: Any) -> None:
    if (place, name) == ("Tokenize", "thinking_budget"):
        with pytest.raises(json_format.ParseError, match="thinking_budget"):
            of_tokenize({name: sent})  # it changes no prompt that can be counted
        return
    assert PLACES[place][0]({name: sent}) == TemplateOptions(**{name: expected})


@everywhere
@pytest.mark.parametrize(
    ("given", "field", "problem"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort", "must be one of none, minimal"),
        ({"reasoning_effort": ""}, "reasoning_effort", "is ''; it must be one of"),
        ({"verbosity": "loud"}, "verbosity", "must be one of low, medium, high"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs", "is no JSON text: "),
        ({"chat_template_kwargs": '{"a": NaN}'}, "chat_template_kwargs", "is no JSON text: "),
        (
            {"chat_template_kwargs": '{"a":' * 25 + "1" + "}" * 25},
            "chat_template_kwargs",
            "is no JSON text: is nested",
        ),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs", "give an object"),
        ({"chat_template_kwargs": "null"}, "chat_template_kwargs", "give an object"),
        ({"chat_template_kwargs": '{"tools": 1}'}, "chat_template_kwargs.tools", "by the server"),
    ],
)
def test_wrong_values(place: str, given: Any, field: str, problem: str) -> None:
    parse, path = PLACES[place]
    with pytest.raises(RequestError) as caught:
        parse(given)
    assert caught.value.field == path + field and problem in caught.value.problem


@pytest.mark.parametrize("kind", [pb.ChatRequest, pb.ChatStreamRequest])
def test_a_budget_has_bounds(kind: Any) -> None:
    for budget in (0, 2**31):
        with pytest.raises(RequestError, match=r"^thinking_budget is "):
            of_call(kind, {"thinking_budget": budget})


@everywhere
def test_long_variables_are_not_parsed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, path = PLACES[place]
    blank = " " * MAX_VARIABLES_BYTES
    assert parse({"chat_template_kwargs": "{}" + blank[2:]}) == TemplateOptions()
    monkeypatch.setattr("jaxserve.server.grpc.parse.parse_json", None)
    with pytest.raises(RequestError, match=f"{path}chat_template_kwargs has 16385 bytes; the li"):
        parse({"chat_template_kwargs": "{" + blank})


def test_names_that_metadata_cannot_hold() -> None:
    assert nameable(["a.b", "c-d_9"]) == ["a.b", "c-d_9"]
    assert nameable(["a b", "c", "é", "x" * 65, "x" * 64]) == ["c", "x" * 64, "..."]
    assert nameable(["a\n"]) == ["..."] and nameable([]) == []
    many = [f"k{i}" for i in range(17)]
    assert nameable(many) == [*many[:16], "..."] and nameable(many[:16]) == many[:16]


async def ignored(call: Any) -> str | None:
    """Return what the trailing metadata of a call names, after its end."""
    if isinstance(call, aio.UnaryStreamCall):
        assert [message async for message in call]
    else:
        assert await call
    assert await call.code() is grpc.StatusCode.OK
    return dict(await call.trailing_metadata()).get("jaxserve-ignored")


OPTIONS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"reasoning_effort": "high", "verbosity": "low"}, "reasoning_effort, verbosity"),
    ({"enable_thinking": False}, "enable_thinking"),
    ({"chat_template_kwargs": json.dumps({"a": 1})}, "chat_template_kwargs.a"),
    ({"chat_template_kwargs": json.dumps({"a\nb": 1, "é": 2})}, "..."),
    (
        {"chat_template_kwargs": json.dumps({"a\nb": 1}), "verbosity": "low"},
        "verbosity, ...",
    ),
]


@pytest.mark.system
def test_what_the_template_does_not_read_may_be_refused(tmp_path: Path) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=1)

    async def main() -> None:
        async with running(tmp_path) as server:
            server.service.prompts.chat.unknown_fields = "error"
            given = {"messages": MESSAGES, "sampling": sampling, "verbosity": "low"}
            for call in (
                server.inference.Chat(pb.ChatRequest(**given)),
                server.inference.ChatStream(pb.ChatStreamRequest(**given)).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await call
                assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "verbosity: has no effect" in str(failure.value.details())
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.system
def test_what_the_template_does_not_read_is_named(tmp_path: Path) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=1)

    async def main() -> None:
        async with running(tmp_path) as server:
            ask = server.inference
            for given, named in OPTIONS:
                chat = {"messages": MESSAGES, "sampling": sampling} | given
                conversation = pb.Conversation(**{"messages": MESSAGES} | given)
                calls = (
                    ask.Chat(pb.ChatRequest(**chat)),
                    ask.ChatStream(pb.ChatStreamRequest(**chat)),
                    ask.Tokenize(pb.TokenizeRequest(conversation=conversation)),
                )
                assert [await ignored(call) for call in calls] == [named] * 3
            request = pb.ChatRequest(messages=MESSAGES, sampling=sampling, thinking_budget=9)
            assert await ignored(ask.Chat(request)) == "thinking_budget"
            said = [{"role": "assistant", "content": "ho", "reasoning_content": "hm"}, *MESSAGES]
            request = pb.ChatRequest(messages=said, sampling=sampling)
            assert await ignored(ask.Chat(request)) == "reasoning_content"
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.system
def test_what_the_template_reads_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "TEMPLATE", THINKS)

    async def main() -> None:
        async with running(tmp_path) as server:
            for given, prompt in (
                ({}, "user: hi\nassistant: "),
                ({"enable_thinking": True}, "user: hi\nassistant: "),
                ({"enable_thinking": False}, "user: hi\nassistant: <think></think>"),
                ({"reasoning_effort": "none"}, "user: hi\nassistant: <think></think>"),
                (
                    {"reasoning_effort": "none", "chat_template_kwargs": '{"enable_thinking": 1}'},
                    "user: hi\nassistant: ",
                ),
            ):
                conversation = pb.Conversation(**{"messages": MESSAGES} | given)
                call = server.inference.Tokenize(pb.TokenizeRequest(conversation=conversation))
                tokenized = await call
                assert tokenized.prompt == prompt and await ignored(call) is None
                sampling = common_pb2.SamplingParams(max_tokens=1)
                chat = pb.ChatRequest(**{"messages": MESSAGES, "sampling": sampling} | given)
                answer = await server.inference.Chat(chat)
                assert answer.usage.prompt_tokens == len(tokenized.token_ids)
            await server.at_rest()

    asyncio.run(main())


def test_a_wrong_value_is_an_invalid_argument(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            ask = server.inference
            chat: dict[str, Any] = {"messages": MESSAGES, "verbosity": "loud"}
            conversation = pb.Conversation(**chat)
            for call, field in (
                (ask.Chat(pb.ChatRequest(**chat)), "verbosity"),
                (ask.Tokenize(pb.TokenizeRequest(conversation=conversation)), "conversation."),
            ):
                with pytest.raises(aio.AioRpcError) as caught:
                    await call
                assert violation(caught.value).startswith(field)
            await server.at_rest()

    asyncio.run(main())
