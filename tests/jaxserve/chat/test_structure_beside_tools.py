"""Structured output of a request that also offers tools: the answer is calls, or follows it."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxserve.chat.answers import harmony
from jaxserve.chat.answers.call_grammar import CallContext, Lead, calls_or_body
from jaxserve.chat.answers.formats import TOOL_FORMATS
from jaxserve.structure.worker import definition, framed
from tests.jaxserve.server.http.scripted_model import ARGUMENTS, FORMS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"total": {"type": "integer"}},
    "required": ["total"],
    "additionalProperties": False,
}
WITH_MARKS = [name for name in TOOL_FORMATS if TOOL_FORMATS[name].syntax.opening]
CALLS = {name: FORMS[name][1](ARGUMENTS) for name in WITH_MARKS}
CALLS["mistral"] = f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}]'  # no [ARGS]
FINAL = "<|channel|>final<|message|>"
CALLS["harmony"] = f"<|channel|>commentary to=functions.add json<|message|>{ARGUMENTS}"


def accepted(grammar: str, text: str) -> bool:
    """Return whether a grammar allows a whole text."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_is_calls_or_follows_the_schema(name: str) -> None:
    context = CallContext(["add"], True, {})
    has_channels = name == "harmony"
    leads = (
        (harmony.before_calls(context), harmony.before_text(context))
        if has_channels
        else (Lead(), Lead())
    )
    frame = calls_or_body(TOOL_FORMATS[name].syntax, context, [{}], *leads)
    grammar = framed(definition("json_schema", json.dumps(SCHEMA)), frame)
    before = FINAL if has_channels else ""
    assert accepted(grammar, CALLS[name])
    assert accepted(grammar, before + '{"total": 12}')
    for wrong in ("It is 12.", before + '{"total": "12"}', CALLS[name].replace("add", "sub")):
        assert not accepted(grammar, wrong)
