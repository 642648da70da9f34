"""Prompts of gpt-oss, whose template is written anew, against test data of openai/harmony.

Its revision is ec7606df9e87e3d0a1fec9f50928c1e407f0c438. Where the published template of the model
differs from the library (the kind of arguments, the sender of a result), it counts.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from jaxserve.chat import Chat, TemplateOptions
from jaxserve.chat.tools import Choice, Tools, tools_of
from jaxserve.structure import Structure
from jaxserve.structure.grammars import Grammars
from tests.byte_tokenizer import ByteTokenizer

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
WORDS = ("<|return|>", "analysis", "assistant", "final")
TEMPLATE = """
{{- "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n" }}
{{- "Knowledge cutoff: 2024-06\\n\\nReasoning: " + (reasoning_effort or "medium") + "\\n\\n" }}
{{- "# Valid channels: analysis, commentary, final. " }}
{{- "Channel must be included for every message." }}
{%- if tools %}
{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}
{%- endif %}
{{- "<|end|>" }}
{%- for message in messages %}
{%- if message.role == "assistant" and "tool_calls" in message %}
{%- if "<|channel|>" in message.content %}{{ raise_exception("marks") }}{% endif %}
{%- if message.content and message.thinking %}{{ raise_exception("both") }}{% endif %}
{%- set said = message.thinking or message.content %}
{%- if said %}{{ "<|start|>assistant<|channel|>analysis<|message|>" + said + "<|end|>" }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- call.arguments | tojson + "<|call|>" }}
{%- elif message.role == "assistant" %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
{%- elif message.role == "tool" %}
{{- "<|start|>functions to=assistant<|channel|>commentary<|message|>" }}
{{- message.content + "<|end|>" }}
{%- else %}
{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""
SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, "
    "final. Channel must be included for every message.<|end|>"
)
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "User asks. We need to use lookup_weather tool.",
    "tool_calls": [
        {
            "id": "abc",
            "type": "function",
            "function": {
                "name": "lookup_weather",
                "arguments": '{"location": "San Francisco"}',
            },
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abc", "content": '{"temperature": 20}'}
CALLED = (
    "<|start|>assistant to=functions.lookup_weather<|channel|>commentary json<|message|>"
    '{"location": "San Francisco"}<|call|>'
    '<|start|>functions to=assistant<|channel|>commentary<|message|>{"temperature": 20}<|end|>'
)


class HarmonyTokens(ByteTokenizer):
    """Bytes, the marks, and words of the format as tokens of their own."""

    special_tokens = MappingProxyType(
        {**ByteTokenizer.special_tokens, **{name: 258 + i for i, name in enumerate(MARKS)}}
        | {"<|return|>": 264}
    )
    vocab_size = 268
    words = MappingProxyType({name: 264 + i for i, name in enumerate(WORDS) if i})

    def encode_special(self, text: str) -> list[int]:
        names = {**self.special_tokens, **self.words}
        parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
        return [
            id
            for part in parts
            for id in ([names[part]] if part in names else self._encode_part(part))
        ]

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        for word, id in self.words.items():
            if id == token_id:
                return word.encode(), False
        return super().token_bytes(token_id, opening)


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Chat]:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    opened = Chat(tmp_path, HarmonyTokens())
    yield opened
    opened.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_simple_conversation(chat: Chat) -> None:
    """The vector test_simple_convo."""
    found = chat.render([user("What is 2 + 2?")])
    asked = "<|start|>user<|message|>What is 2 + 2?<|end|><|start|>assistant"
    assert found.text == SYSTEM + asked
    assert found.reading.channels and found.reading.thinks and not found.reading.opened
    high = chat.render([user("Hi")], options=TemplateOptions(reasoning_effort="high"))
    assert "Reasoning: high" in high.text


def test_thoughts_before_an_answer_are_dropped(chat: Chat) -> None:
    """The vector test_dropping_cot_by_default."""
    answer = {"role": "assistant", "content": "2 + 2 equals 4.", "reasoning_content": "Simple."}
    found = chat.render([user("What is 2 + 2?"), answer, user("What about 9 / 2?")])
    assert found.text.removeprefix(SYSTEM) == (
        "<|start|>user<|message|>What is 2 + 2?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2 + 2 equals 4.<|end|>"
        "<|start|>user<|message|>What about 9 / 2?<|end|><|start|>assistant"
    )
    assert not found.unread


def test_thoughts_before_a_call_are_kept(chat: Chat) -> None:
    """The vector test_does_not_drop_if_ongoing_analysis."""
    asked = user("What is the weather in SF?")
    found = chat.render([asked, CALL, RESULT])
    thought = "<|start|>assistant<|channel|>analysis<|message|>User asks. We need to use "
    begin = "<|start|>user<|message|>What is the weather in SF?<|end|>"
    assert found.text.removeprefix(SYSTEM) == (
        f"{begin}{thought}lookup_weather tool.<|end|>{CALLED}<|start|>assistant"
    )
    # With an answer behind them they are past, and the call stays.
    later = [asked, CALL, RESULT, {"role": "assistant", "content": "20."}, user("And now?")]
    assert chat.render(later).text.removeprefix(SYSTEM) == (
        f"{begin}{CALLED}<|start|>assistant<|channel|>final<|message|>20.<|end|>"
        "<|start|>user<|message|>And now?<|end|><|start|>assistant"
    )


def test_text_beside_a_call_is_in_the_thought(chat: Chat) -> None:
    text = chat.render([user("SF?"), CALL | {"content": "I look."}, RESULT]).text
    assert "<|message|>User asks. We need to use lookup_weather tool.\n\nI look.<|end|>" in text


def test_a_budget_ends_the_first_message(chat: Chat) -> None:
    ids = HarmonyTokens.special_tokens
    words = HarmonyTokens.words
    bounded = TemplateOptions(thinking_budget=9)
    budget = chat.render([user("Hi")], options=bounded).thought_budget
    assert budget and budget.gap is None
    assert budget.opening == (ids["<|channel|>"], words["analysis"], ids["<|message|>"])
    whole = (
        *(ids["<|end|>"], ids["<|start|>"], words["assistant"]),
        *(ids["<|channel|>"], words["final"], ids["<|message|>"]),
    )
    assert (budget.end, budget.closing) == (ids["<|end|>"], whole)
    # With functions the model chooses the next channel: it may call one.
    budget = chat.render([user("Hi")], tools=functions(), options=bounded).thought_budget
    assert budget and budget.closing == whole[:3]


# ---- grammars


def functions(required: bool = False, strict: bool = False) -> Tools:
    integer = {"type": "integer"}
    schema = {"type": "object", "properties": {"a": integer}, "required": ["a"]}
    schema["additionalProperties"] = False
    found = tools_of(
        [{"name": "add", "parameters": schema, "strict": strict}],
        Choice("required" if required else "auto"),
        True,
        lambda i: f"tools[{i}]",
    )
    assert found
    return found


@pytest.fixture
def fits() -> Iterator[Callable[[Structure, str], bool]]:
    """Return a function that says whether a whole answer follows a structure."""
    tokenizer = HarmonyTokens()
    grammars = Grammars(tokenizer, tokenizer.eos_ids, tokenizer.vocab_size)

    def whole(structure: Structure, text: str) -> bool:
        tokens = [*tokenizer.encode_special(text), *tokenizer.eos_ids]
        return grammars.compile(structure).matcher().fits(tokens) == len(tokens)

    yield whole
    grammars.close()


THOUGHT = "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"
CALL_OF_ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'


def test_required_calls(chat: Chat, fits: Callable[[Structure, str], bool]) -> None:
    structure = chat.render([user("Hi")], tools=functions(required=True)).structure
    assert structure
    assert fits(structure, CALL_OF_ADD) and fits(structure, THOUGHT * 2 + CALL_OF_ADD)
    assert not fits(structure, CALL_OF_ADD.replace("1", "x"))
    assert not fits(structure, "<|channel|>final<|message|>12")


def test_strict_calls(chat: Chat, fits: Callable[[Structure, str], bool]) -> None:
    structure = chat.render([user("Hi")], tools=functions(strict=True)).structure
    assert structure
    preamble = "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"
    for right in (
        CALL_OF_ADD,
        THOUGHT + preamble + CALL_OF_ADD,
        "<|channel|>final<|message|>12",
        THOUGHT + "<|channel|>final<|message|>",
    ):
        assert fits(structure, right), right
    turned = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}'
    assert fits(structure, turned)
    for wrong in (
        turned.replace("1", '"x"'),
        CALL_OF_ADD.replace("1", '"x"'),
        CALL_OF_ADD.replace("add", "other"),
        "12",
        THOUGHT + "12",
    ):
        assert not fits(structure, wrong), wrong


def test_a_schema_is_for_the_answer_proper(
    chat: Chat, fits: Callable[[Structure, str], bool]
) -> None:
    frame = chat.render([user("Hi")]).frame
    structure = Structure("choice", '["yes", "no"]', "choice", frame)
    assert fits(structure, "<|channel|>final<|message|>yes")
    assert fits(structure, THOUGHT + "<|channel|>final<|message|>no")
    assert not fits(structure, "yes")
    assert not fits(structure, "<|channel|>final<|message|>maybe")
