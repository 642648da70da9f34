"""Structured output over gRPC and HTTP: followed, or refused without delaying other requests."""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any, Literal

import grpc
import jsonschema
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status
from pydantic import BaseModel

from jaxserve.client import AsyncClient
from jaxserve.errors import GrammarError
from jaxserve.server.core.limits import Limits
from jaxserve.server.core.workers import MAX_UNCOMPILED
from jaxserve.structure import Structure
from jaxserve.v1 import common_pb2, inference_pb2
from tests.jaxserve.server.harness import running, until
from tests.jaxserve.server.http.harness import serving

pytestmark = pytest.mark.system
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Rosie", "Max"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRUCTURES: dict[str, tuple[Any, str]] = {  # and what the whole text matches
    "json_schema": (json.dumps(SCHEMA), r"\{\s*\"name\"(.|\n)*\}"),
    "regex": ("[A-F]{3}-[0-9]{2}", "[A-F]{3}-[0-9]{2}"),
    "choice": (common_pb2.TextChoice(texts=["yes", "no", 'maybe "so"']), 'yes|no|maybe "so"'),
    "lark": ('start: "<" word ">"\nword: /[a-z]{4}/', "<[a-z]{4}>"),
}


def asked(text: str = "hi", **sampling: Any) -> inference_pb2.GenerateRequest:
    given = common_pb2.SamplingParams(**({"max_tokens": 200, "seed": 3} | sampling))
    return inference_pb2.GenerateRequest(text=text, sampling=given)


@pytest.mark.parametrize("kind", STRUCTURES)
def test_every_kind_over_grpc(tmp_path: Path, kind: str) -> None:
    value, pattern = STRUCTURES[kind]

    async def main() -> None:
        async with running(tmp_path) as server:
            answer = await server.inference.Generate(asked(n=2, **{kind: value}))
            texts = [choice.text for choice in answer.choices]
            assert len(texts) == 2 and all(re.fullmatch(pattern, text) for text in texts), texts
            for choice in answer.choices:
                assert choice.finish.reason == common_pb2.FINISH_REASON_STOP
                assert choice.finish.WhichOneof("stopped_by") is None  # the grammar has ended it
            request = inference_pb2.GenerateStreamRequest(
                text="hi", sampling=asked(**{kind: value}).sampling
            )
            deltas = [
                message.delta.text async for message in server.inference.GenerateStream(request)
            ]
            assert "".join(deltas) == texts[0]  # of the same seed
            await server.at_rest()

    asyncio.run(main())


def test_a_text_that_may_go_on_ends_with_an_end_token(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            answers = [
                await server.inference.Generate(asked(regex="[a-c]{1,3}", seed=seed))
                for seed in range(20)
            ]
            ends = set()
            for answer in answers:
                (choice,) = answer.choices
                assert re.fullmatch("[a-c]{1,3}", choice.text)
                ends.add((len(choice.text) == 3, choice.finish.stop_token_id))
            assert ends == {(False, 257), (True, 0)}
            await server.at_rest()

    asyncio.run(main())


def test_our_own_client_asks_for_every_kind(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "json_schema": {"const": [1, "b"]},
        "json_object": True,
        "regex": "[ab]{3}",
        "choice": ["no", "é"],
        "lark": 'start: "x"+ "."',
    }
    patterns = (r'\[\s*1\s*,\s*"b"\s*\]', r"\{(.|\n)*", "[ab]{3}", "no|é", r"x+\.?")

    async def main() -> None:
        async with running(tmp_path) as server, AsyncClient(server.address) as client:
            for (kind, value), pattern in zip(values.items(), patterns, strict=True):
                result = await client.generate(
                    "hi", structure=Structure.of(kind, value), max_tokens=40, seed=2
                )
                assert re.fullmatch(pattern, result.choices[0].text), (kind, result.choices[0].text)
            with pytest.raises(GrammarError) as caught:
                await client.generate("hi", structure=Structure.of("regex", "("))
            assert caught.value.field == "sampling.regex"

    asyncio.run(main())


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "keyword": (
        {"json_schema": '{"uniqueItems": true}'},
        "sampling.json_schema",
        "/uniqueItems cannot be followed",
    ),
    "no JSON": ({"json_schema": "{"}, "sampling.json_schema", "is no JSON: "),
    "no grammar": ({"lark": "start: nothing"}, "sampling.lark", "cannot be used"),
    "min_tokens": (
        {"regex": "a+", "min_tokens": 2},
        "sampling.min_tokens",
        "regex says where the text ends",
    ),
    "ignore_eos": (
        {"regex": "a+", "ignore_eos": True},
        "sampling.ignore_eos",
        "regex says where the text ends",
    ),
    "dead end": (
        {"regex": "a+", "allowed_token_ids": common_pb2.TokenIds(ids=[66])},
        "sampling.regex",
        "cannot be followed beyond 0 tokens",
    ),
    "another dead end": (
        {"regex": "abc", "allowed_token_ids": common_pb2.TokenIds(ids=[97])},
        "sampling.regex",
        "cannot be followed beyond 1 tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_an_error_with_the_fields_path(tmp_path: Path, case: str) -> None:
    sampling, field, problem = REFUSED[case]

    async def main() -> None:
        async with running(tmp_path) as server:
            with pytest.raises(aio.AioRpcError) as caught:
                await server.inference.Generate(asked(**sampling))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
            assert problem in (caught.value.details() or "")
            status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
            assert status
            bad = error_details_pb2.BadRequest()
            assert (
                any(detail.Unpack(bad) for detail in status.details)
                and bad.field_violations[0].field == field
            )
            await server.at_rest()

    asyncio.run(main())


def nested(depth: int) -> str:
    return '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth


BOMBS: dict[str, dict[str, Any]] = {
    "values": {"json_schema": json.dumps({"enum": [f"value{i}" for i in range(50_000)]})},
    "values that fit": {"json_schema": json.dumps({"enum": [f"v{i}" for i in range(7_000)]})},
    "depth": {"json_schema": nested(300)},
    "counts": {"regex": "(((((a{1,100}){1,100}){1,100}){1,100}){1,100})"},
    "more counts": {
        "json_schema": '{"type": "array", "minItems": 99999, "items": {"type": "string", "minLength": 99999}}'
    },
    "itself": {"json_schema": '{"$ref": "#"}'},
    "itself, too": {
        "json_schema": '{"anyOf": [{"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": "#"}}}]}'
    },
    "ambiguity": {"lark": 'start: start start | "a" | '},
    "parentheses": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "more parentheses": {"lark": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "patterns": {
        "json_schema": json.dumps(
            {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghij"]}
        )
    },
    "many patterns": {
        "json_schema": json.dumps(
            {
                "type": "object",
                "properties": {
                    f"p{i}": {"type": "string", "pattern": f".*x{{{i}}}.*"} for i in range(500)
                },
            }
        )
    },
}


def test_bombs_are_refused_or_served_and_others_do_not_feel_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, observers=()) as server:
            await server.inference.Generate(asked(regex="a"))  # starts the process
            alone = await steps_of(server)
            for name, sampling in BOMBS.items():
                bomb = asyncio.ensure_future(
                    server.inference.Generate(asked(max_tokens=8, **sampling), timeout=60)
                )
                assert await steps_of(server) == alone, name
                try:
                    await bomb
                except aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, error.details())
            await server.at_rest()

    async def steps_of(server: Any) -> int:
        """Return the launches that a request without any grammar takes part in."""
        before = server.runner.launches["plain"]
        request = asked(max_tokens=20)
        request.request_id = "plain"
        await server.inference.Generate(request)
        return server.runner.launches["plain"] - before

    asyncio.run(main())


def test_a_grammar_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    slow = {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnop"]}

    async def main() -> None:
        async with running(tmp_path, limits=Limits(grammar_seconds=0.1)) as server:
            with pytest.raises(
                aio.AioRpcError,
                match=r"takes more than 0.1 s .--grammar-seconds. or too much memory",
            ):
                await server.inference.Generate(asked(json_schema=json.dumps(slow)))
            server.service.prompts.grammars._worker._seconds = 60.0
            answer = await server.inference.Generate(asked(regex="ab"))  # by another process
            assert answer.choices[0].text == "ab"
            await server.at_rest()

    asyncio.run(main())


def test_a_grammar_that_is_known_waits_for_no_other(tmp_path: Path) -> None:
    def is_turned_away(call: "asyncio.Future[Any]") -> bool:
        error = call.exception() if call.done() else None
        return (
            isinstance(error, aio.AioRpcError)
            and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        )

    async def main() -> None:
        go_on = threading.Event()
        async with running(tmp_path) as server:
            await server.inference.Generate(asked(regex="ab"))
            grammars = server.service.prompts.grammars
            check = grammars._check
            grammars._check = lambda asked: (go_on.wait(60), check(asked))[1]  # type: ignore[method-assign]
            others = [
                asyncio.ensure_future(server.inference.Generate(asked(regex="cd")))
                for _ in range(70)
            ]
            await until(lambda: sum(map(is_turned_away, others)) == 70 - MAX_UNCOMPILED)
            answer = await server.inference.Generate(asked(regex="ab"))
            assert answer.choices[0].text == "ab"
            assert sum(other.done() for other in others) == 70 - MAX_UNCOMPILED
            go_on.set()
            answers = await asyncio.gather(*others, return_exceptions=True)
            assert sum(not isinstance(answer, Exception) for answer in answers) == MAX_UNCOMPILED

    asyncio.run(main())


class Person(BaseModel):
    name: Literal["Rosie", "Max"]
    age: Literal[3, 50]


def test_openais_client(tmp_path: Path) -> None:
    messages: Any = [{"role": "user", "content": "who?"}]
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
    }

    async def main() -> None:
        async with serving(tmp_path) as http:
            chats = http.client.chat.completions
            made = await chats.create(
                model="fake", messages=messages, response_format=wanted, seed=4
            )  # type: ignore[arg-type]
            jsonschema.validate(json.loads(made.choices[0].message.content or ""), SCHEMA)
            assert made.choices[0].finish_reason == "stop"
            stream: Any = await chats.create(
                model="fake",
                messages=messages,
                response_format=wanted,
                seed=4,
                stream=True,  # type: ignore[arg-type]
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == made.choices[0].message.content
            parsed = await chats.parse(
                model="fake", messages=messages, response_format=Person, seed=5, max_tokens=400
            )
            assert isinstance(parsed.choices[0].message.parsed, Person)
            whole: Any = {"type": "json_object"}
            made = await chats.create(
                model="fake", messages=messages, response_format=whole, seed=4, max_tokens=60
            )
            assert (made.choices[0].message.content or "").startswith("{")
            for kind, (value, pattern) in {
                "regex": ("[0-9]{4}", "[0-9]{4}"),
                "choice": (["red", "blue"], "red|blue"),
                "lark": ('start: "a" "b"', "ab"),
            }.items():
                body = {"prompt": "x", "response_format": {"type": kind, kind: value}}
                response = await http.post("/v1/completions", body)
                assert re.fullmatch(pattern, response.json()["choices"][0]["text"]), response.text

    asyncio.run(main())


WRONG: dict[str, tuple[Any, str]] = {
    "type": ({"type": "xml"}, "response_format.type"),
    "no type": ({}, "response_format.type"),
    "no schema": ({"type": "json_schema"}, "response_format.json_schema"),
    "an empty schema": (
        {"type": "json_schema", "json_schema": {"name": "x"}},
        "response_format.json_schema.schema",
    ),
    "keyword": (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        "response_format.json_schema.schema",
    ),
    "more": ({"type": "json_object", "schema": {}}, "response_format.schema"),
    "strict": (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}},
        "response_format.json_schema.strict",
    ),
    "regex": ({"type": "regex", "regex": "("}, "response_format.regex"),
    "choice": ({"type": "choice", "choice": ["a", 1]}, "response_format.choice[1]"),
}


def test_what_http_refuses(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            for name, (given, field) in WRONG.items():
                for path, body in (
                    ("/v1/completions", {"prompt": "x"}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                ):
                    response = await http.post(path, body | {"response_format": given})
                    assert response.status_code == 400, (name, response.text)
                    assert response.json()["error"]["param"] == field, (name, response.text)

    asyncio.run(main())
