"""A model on the fake device that says what a test wants, with tools in its chat template."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.server import harness
from tests.jaxserve.server.http.harness import Http, serving

PATH = "/v1/chat/completions"
Says = Callable[..., None]  # given the first answer, and later ones if they differ
SPECIAL = MappingProxyType(
    {"[TOOL_CALLS]": 258, "[ARGS]": 259, "<|python_tag|>": 260, "<think>": 261, "</think>": 262}
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "a + b", "parameters": SCHEMA},
}
ASKED: list[Any] = [{"role": "user", "content": "7 plus 5?"}]
ARGUMENTS = '{"a": 7, "b": 5}'
TURNS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ "
    "m.content or '' }}"
    "{% for call in m.tool_calls or [] %}CALL{{ call.function.arguments | tojson }}{% endfor "
    "%}{{ '\n' }}{% endfor %}"
)
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"


def members(arguments: str) -> list[tuple[str, str]]:
    """Return names and texts of the members of an object as `json.dumps` writes it."""
    found: list[tuple[str, str]] = []
    decoder = json.JSONDecoder()
    at = 1
    while arguments[at] != "}":
        name, at = decoder.raw_decode(arguments, at + (arguments[at] == " "))
        start = at + 2  # behind the colon and the space
        _, at = decoder.raw_decode(arguments, start)
        found.append((name, arguments[start:at]))
        at += arguments[at] == ","
    return found


def one_by_one(call: str, member: str) -> Callable[[str], str]:
    """Return the writer of a call whose arguments are written one by one."""

    def write(arguments: str) -> str:
        return call % "".join(member % each for each in members(arguments))

    return write


FORMS: dict[str, tuple[str, Callable[[str], str], str]] = {
    # the template's mark, one call of add as the model writes it with these arguments, and two
    "hermes": (
        "<tool_call>",
        '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'.__mod__,
        "{0}\n{0}",
    ),
    "llama": (
        "<|start_header_id|>tool_calls",
        '<|python_tag|>{"name": "add", "parameters": %s}'.__mod__,
        "{0}; {1}",
    ),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]add[ARGS]%s".__mod__, "{0}{0}"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        SECTION.format("<｜tool▁call▁begin｜>add<｜tool▁sep｜>%s<｜tool▁call▁end｜>").__mod__,
        "{0}{0}",
    ),
    "qwen3_coder": (
        "<tool_call><function=",
        one_by_one(
            "<tool_call>\n<function=add>\n%s</function>\n</tool_call>",
            "<parameter=%s>\n%s\n</parameter>\n",
        ),
        "{0}\n{0}",
    ),
    "glm45": (
        "<tool_call><arg_key>",
        one_by_one(
            "<tool_call>add\n%s</tool_call>",
            "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n",
        ),
        "{0}\n{0}",
    ),
    "minimax_m2": (
        "<minimax:tool_call>",
        one_by_one(
            '<minimax:tool_call>\n<invoke name="add">\n%s</invoke>\n</minimax:tool_call>',
            '<parameter name="%s">%s</parameter>\n',
        ),
        "{0}\n{0}",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
            "<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_calls_section_end|>"
        ).__mod__,
        "{0}{0}",
    ),
}


def with_each_form(values: Sequence[object], names: Sequence[str] = ()) -> list[ParameterSet]:
    """Return each form with each value as parameters; of each form all but one are marked slow.

    The one is another value from form to form. `names` are for the ids, in place of the values.
    """
    return [
        pytest.param(
            form,
            value,
            marks=[] if number % len(values) == place else [pytest.mark.slow],
            id=f"{form}-{names[place] if names else value}",
        )
        for number, form in enumerate(FORMS)
        for place, value in enumerate(values)
    ]


class MarkedTokenizer(ByteTokenizer):
    """A tokenizer with more special tokens, which a text shows only on request."""

    vocab_size = 263
    special_tokens = MappingProxyType({**ByteTokenizer.special_tokens, **SPECIAL})

    def token_text(self, token_id: int) -> str:
        return {id: name for name, id in SPECIAL.items()}.get(token_id) or super().token_text(
            token_id
        )

    def ids(self, text: str) -> list[int]:
        """Encode a text in which marks are single tokens, as a model writes them."""
        found: list[int] = []
        while text:
            name = next((name for name in SPECIAL if text.startswith(name)), None)
            found += [SPECIAL[name]] if name else text[0].encode()
            text = text[len(name or text[0]) :]
        return found


@asynccontextmanager
async def speaking(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mark: str, **options: Any
) -> AsyncIterator[Http]:
    """Serve a model whose template has the mark in a comment, which selects the format."""
    monkeypatch.setattr(
        harness, "TEMPLATE", TURNS + "{{ '' if true else '" + mark + "' }}" + options.pop("end", "")
    )
    async with serving(folder, **options) as http:
        yield http


def joined(chunks: list[Any]) -> tuple[str, str, list[dict[str, str]], str]:
    """Return content, reasoning, calls and finish reason of choice 0 of a stream."""
    content = ""
    reasoning = ""
    reason = ""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content", "")
        for event in delta.get("tool_calls", []):
            if event["index"] == len(calls):
                assert event["type"] == "function" and event["function"]["arguments"] == "", (
                    "the name comes first"
                )
                calls.append(
                    {"id": event["id"], "name": event["function"]["name"], "arguments": ""}
                )
            else:
                assert set(event) == {"index", "function"} and set(event["function"]) == {
                    "arguments"
                }
                calls[event["index"]]["arguments"] += event["function"]["arguments"]
        reason = chunk["choices"][0]["finish_reason"] or reason
    return content, reasoning, calls, reason


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}
