"""Every field of every request of jaxserve.v1 at, below and above its bounds.

After the requests of each field a canary gets the same answer as before.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from jaxserve.v1 import admin_pb2, inference_pb2
from tests.jaxserve.server.harness import Running, running
from tests.jaxserve.server.test_server_isolation import canary as generating_canary

GENERATE = {"text": "hello", "sampling": {"maxTokens": "2"}}
CHAT = {"messages": [{"role": "u", "content": "hi"}], "sampling": {"maxTokens": "2"}}
BASES: dict[str, dict[str, Any]] = {
    "Generate": GENERATE,
    "GenerateStream": GENERATE,
    "Chat": CHAT,
    "ChatStream": CHAT,
    "Score": {"text": "hello"},
    "Tokenize": {"text": "hello"},
    "Detokenize": {"tokenIds": [104]},
    "Abort": {"requestIds": ["nobody"]},
    "Embed": {"inputs": [{"text": "hello"}]},
}
RANGES: dict[str, tuple[list[Any], list[Any]]] = {  # field of SamplingParams -> accepted, refused
    "temperature": ([0, 2], [-0.01, 2.01, "NaN", "Infinity"]),
    "topK": ([0, 2**31 - 1], [-1, 2**31]),
    "topP": ([0.01, 1], [0, -0.1, 1.01, "NaN"]),
    "minP": ([0, 1], [-0.01, 1.01]),
    "repetitionPenalty": ([0.01, 100], [0, 100.1, "Infinity"]),
    "presencePenalty": ([-2, 2], [-2.01, 2.01]),
    "frequencyPenalty": ([-2, 2], [-2.01, 2.01]),
    "logitBias": (
        [{"0": 100, "257": -100}, {str(i): 0 for i in range(258)}],
        [{"258": 0}, {"1": 100.1}, {"1": "NaN"}, {str(i): 0 for i in range(1025)}],
    ),
    "allowedTokenIds": ([{"ids": [0, 257]}], [{"ids": []}, {"ids": [258]}]),
    "seed": ([0, 2**64 - 1], []),
    "stop": ([["x"] * 16, ["y" * 256], ["é" * 128]], [["x"] * 17, ["y" * 257], [""], ["é" * 129]]),
    "stopTokenIds": ([[0, 257], [1] * 32], [[258], [1] * 33]),
    "includeStop": ([True, False], []),
    "ignoreEos": ([True, False], []),
    "minTokens": ([0, 2], [-1, 3, 2**31]),
    "maxTokens": ([1, 506, 507, 2**31 - 1], [0, -1, 2**31]),
    "n": ([1, 16], [0, -1, 17]),
    "logprobs": ([0, 20], [-1, 21]),
    "promptLogprobs": ([0, 20], [-1, 21]),
    "echo": ([True, False], []),
    "jsonSchema": (
        ['{"type": "integer"}', "{}", '{"enum": [1, "a"]}'],
        [
            "",
            "{",
            "[]",
            '{"not": {}}',
            '{"type": "string", "format": "none"}',
            json.dumps({"const": "x" * 2**16}),
        ],
    ),
    "jsonObject": ([True], [False]),
    "regex": (["[0-9]+", "x" * 2**15], ["", "(", "x" * (2**16 + 1)]),
    "choice": (
        [{"texts": ["a"]}, {"texts": ["a", "b"] * 512}],
        [{"texts": []}, {"texts": [""]}, {"texts": ["a"] * 1025}],
    ),
    "lark": (['start: "a"'], ["", "start: b", "start: " + "(" * 30000 + '"a"' + ")" * 30000]),
}
TOKEN_IDS = (
    [{"ids": [0, 257]}, {"ids": [1] * 500}],
    [{"ids": []}, {"ids": [258]}, {"ids": [1] * 512}],
)
PROMPTS = {"text": (["", "x" * 500], ["x" * 512]), "tokenIds": TOKEN_IDS}
COMMON = {
    "requestId": (["", "r" * 128], ["r" * 129, "é" * 65]),
    "priority": ([0, 100], [-1, 101]),
    "cacheSalt": (["", "s" * 128], ["s" * 129]),
    "sampling": ([{}], []),
}
MESSAGES = (
    [[{"role": "user", "content": "x" * 400}]],
    [[], [{"role": "u", "content": "x" * 512}], [{}] * 4097],
)
INPUTS = (
    [
        [{"text": "x"}] * 130,
        [{"text": ""}, {"tokenIds": {"ids": [0, 257]}}],
        [{"text": "x" * 511}],
        [{"tokenIds": {"ids": [1] * 512}}],
        [{"text": "x"}] * 2048,
    ],
    [
        [],
        [{}],
        [{"text": "x"}, {"text": "x" * 512}],
        [{"tokenIds": {"ids": []}}],
        [{"tokenIds": {"ids": [258]}}],
        [{"tokenIds": {"ids": [1] * 513}}],
        [{"text": "x"}] * 2049,
    ],
)
TOOLS: dict[
    str, tuple[list[Any], list[Any]]
] = {  # the template of the tests takes none: none may be called there
    "tools": (
        [[]],
        [
            [{}],
            [{"name": "a b"}],
            [{"name": "x" * 129}],
            [{"name": "f"}] * 2,
            [{"name": "f", "parameters": "{"}],
            [{"name": "f", "parameters": "[]"}],
            [{"name": "f", "parameters": '{"a":' * 25 + "1" + "}" * 25}],
            [{"name": "f", "strict": True}],
            [{"name": f"f{i}"} for i in range(129)],
            [{"name": "f", "description": "x" * 256 * 1024}],
            [{"name": "f"}],
        ],
    ),
    "toolChoice": ([0, 1, 2], [3, 4]),
    "toolName": ([""], ["f"]),
    "parallelToolCalls": ([True, False], []),
}
TEMPLATE: dict[str, tuple[list[Any], list[Any]]] = {
    "reasoningEffort": (
        ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
        ["", "None", "x" * 9000],
    ),
    "enableThinking": ([True, False], []),
    "verbosity": (["low", "medium", "high"], ["", "none"]),
    "chatTemplateKwargs": (
        ["", "{}", '{"a": 1}', json.dumps({"a": "x" * (16 * 1024 - 9)})],
        [
            "{",
            "[]",
            "null",
            '{"a": Infinity}',
            '{"messages": []}',
            '{"a":' * 25 + "1" + "}" * 25,
            json.dumps({"a": "x" * (16 * 1024 - 8)}),
        ],
    ),
}
TALK = {"messages": [{"role": "u"}]}
CONVERSATIONS = (
    [TALK, *(TALK | {name: value} for name, (fine, _) in TEMPLATE.items() for value in fine)],
    [{}, *(TALK | {name: value} for name, (_, wrong) in TEMPLATE.items() for value in wrong)],
)
BUDGET = {"thinkingBudget": ([1, 2**31 - 1], [0, 2**31, 2**32 - 1])}
FIELDS: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "Generate": PROMPTS | COMMON,
    "GenerateStream": PROMPTS | COMMON,
    "Chat": {"messages": MESSAGES} | COMMON | TOOLS | TEMPLATE | BUDGET,
    "ChatStream": {"messages": MESSAGES} | COMMON | TOOLS | TEMPLATE | BUDGET,
    "Score": PROMPTS
    | {
        "requestId": COMMON["requestId"],
        "priority": COMMON["priority"],
        "topLogprobs": ([0, 20], [-1, 21]),
    },
    "Tokenize": {
        "text": (["", "x" * 9000], []),
        "conversation": CONVERSATIONS,
    },
    "Detokenize": {"tokenIds": ([[], [0, 257], [1] * 10_000], [[258], [2**32 - 1]])},
    "Abort": {"requestIds": ([["a"], ["a"] * 4096], [[], ["a"] * 4097])},
    "Embed": {name: COMMON[name] for name in ("requestId", "priority", "cacheSalt")}
    | {"inputs": INPUTS},
    "StartProfile": {"maxSeconds": ([], [0, -1, 60.1, "NaN"])},
}
FORBIDDEN_TOGETHER = {
    "text",
    "tokenIds",
    "conversation",
}  # of a oneof: setting one takes the other out


def cases(embeds: bool) -> Iterator[tuple[str, list[tuple[dict[str, Any], bool]]]]:
    """Yield method, and requests as JSON that give a field its values: does the server accept them?

    The server embeds, or else generates.
    """
    for method, fields in FIELDS.items():
        if (method == "Embed") != embeds:
            continue
        base = BASES.get(method, {})
        for field, values in fields.items():
            kept = {
                k: v
                for k, v in base.items()
                if not (field in FORBIDDEN_TOGETHER and k in FORBIDDEN_TOGETHER)
            }
            yield method, [(kept | {field: value}, fine) for value, fine in judged(values)]
        if "sampling" in fields:
            for field, values in RANGES.items():
                sampling = [
                    (base["sampling"] | {field: value}, fine) for value, fine in judged(values)
                ]
                yield method, [(base | {"sampling": given}, fine) for given, fine in sampling]


def judged(values: tuple[list[Any], list[Any]]) -> Iterator[tuple[Any, bool]]:
    """Yield the accepted values and the refused ones, each with whether it is accepted."""
    accepted, refused = values
    yield from ((value, True) for value in accepted)
    yield from ((value, False) for value in refused)


def input_of(method: str) -> Descriptor:
    for module in (inference_pb2, admin_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            if method in service.methods_by_name:
                return service.methods_by_name[method].input_type
    raise KeyError(method)


def names(descriptor: Descriptor) -> set[str]:
    return {field.json_name for field in descriptor.fields}


def test_no_field_is_forgotten() -> None:
    for module in (inference_pb2, admin_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert names(method.input_type) == set(FIELDS.get(method.name, {})), method.name
    assert names(input_of("Generate").fields_by_name["sampling"].message_type) == set(RANGES)
    conversation = input_of("Tokenize").fields_by_name["conversation"].message_type
    assert names(conversation) == {"messages", *TEMPLATE}


async def send(server: Running, method: str, request: dict[str, Any]) -> aio.AioRpcError | None:
    """Send a request and return its error, if any."""
    stub = server.admin if hasattr(server.admin, method) else server.inference
    message: Message = json_format.ParseDict(request, _new(method))
    call = getattr(stub, method)(message)
    try:
        if method.endswith("Stream"):
            async for _ in call:
                pass
        else:
            await call
    except aio.AioRpcError as error:
        return error
    return None


def _new(method: str) -> Message:
    name = input_of(method).name
    return (getattr(inference_pb2, name, None) or getattr(admin_pb2, name))()


def violation(error: aio.AioRpcError) -> str:
    """Return the field that an INVALID_ARGUMENT with exactly one ErrorInfo names."""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    bad = error_details_pb2.BadRequest()
    assert sum(d.Is(error_details_pb2.ErrorInfo.DESCRIPTOR) for d in status.details) == 1
    assert any(d.Unpack(bad) for d in status.details if d.Is(bad.DESCRIPTOR))
    return bad.field_violations[0].field


async def embedding_canary(server: Running) -> tuple[int, bytes]:
    """Return the engine steps of an embedding, and the answer."""
    before = server.runner.launches["canary"]
    message = inference_pb2.EmbedRequest(
        inputs=[inference_pb2.EmbedInput(text="canary")], request_id="canary"
    )
    response = await server.inference.Embed(message)
    response.usage.ClearField("cached_prompt_tokens")
    return server.runner.launches["canary"] - before, response.SerializeToString(deterministic=True)


@pytest.mark.system
@pytest.mark.parametrize("embeds", [False, True])
def test_every_bound(tmp_path: Path, embeds: bool) -> None:
    canary = embedding_canary if embeds else generating_canary

    async def main() -> None:
        async with running(tmp_path, max_batch=16, embeds=embeds) as server:
            expected = await canary(server)
            for method, requests in cases(embeds):
                for request, accepted in requests:
                    error = await send(server, method, request)
                    if accepted:
                        assert error is None, (method, request, error)
                    else:
                        assert error is not None, (method, request)
                        assert violation(error), (method, request)
                assert (await canary(server))[1] == expected[1], (method, requests)
            await server.at_rest()

    asyncio.run(main())


def test_unknown_fields_are_refused(tmp_path: Path) -> None:
    """Fields of newer clients are refused, and not dropped in silence."""
    deep = inference_pb2.GenerateRequest(text="x")
    unknown = b"\xf8\x3f\x01"  # field 1023, varint 1
    inner = deep.sampling.SerializeToString() + unknown
    bodies = {
        "request": deep.SerializeToString() + unknown,
        "sampling": b"\x12\x01x" + b"\x22" + bytes([len(inner)]) + inner,
    }

    async def main() -> None:
        async with running(tmp_path) as server:
            method = server.channel.unary_unary("/jaxserve.v1.InferenceService/Generate")
            for path, body in bodies.items():
                try:
                    await method(body)
                except aio.AioRpcError as error:
                    assert violation(error) == path and "1023" in (error.details() or "")
                else:
                    raise AssertionError(path)

    asyncio.run(main())
