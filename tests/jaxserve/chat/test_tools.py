"""Tools in templates: as transformers renders them, arguments in both shapes, and clients who forge
turns.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.chat import Chat, Tools
from jaxserve.chat.tools import with_arguments
from jaxserve.errors import ChatError, RequestError
from tests.byte_tokenizer import ByteTokenizer

pytestmark = pytest.mark.system
GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "chat_tools.json").read_text(encoding="utf-8")
)
OpenChat = Callable[..., Chat]


@pytest.fixture
def chat_of(tmp_path: Path) -> Iterator[OpenChat]:
    """A Chat with a template of its own and ByteTokenizer, whose special tokens are <bos> and
    <eos>.
    """
    chats = []

    def opened(template: str, **parsers: str) -> Chat:
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        chats.append(Chat(tmp_path, ByteTokenizer(), **parsers))
        return chats[-1]

    yield opened
    for chat in chats:
        chat.close()


def test_the_text_is_that_of_transformers(chat_of: OpenChat) -> None:
    chats: dict[str, Chat] = {}
    for case in GOLDEN:
        if case["template"] not in chats:
            chats[case["template"]] = chat_of(case["template"])
            _ = chats[case["template"]].template  # before the file is another one
        chat = chats[case["template"]]
        rendered = chat.render(
            case["messages"], tools=Tools(tuple(case["tools"])) if case["tools"] else None
        )
        text = case["text"]
        system = case["messages"][0]
        if system["role"] == "system" and system["content"] not in text:
            assert case["name"] == "hermes" and not case["tools"]  # else it is in the prompt
            text = text.replace("user\n", f"user\n{system['content']}\n\n", 1)
        assert rendered.text == text, case["name"]
        reading = rendered.reading
        assert (reading.tools is chat.with_tools.formats.tools, reading.names) == (
            (True, {"get_weather", "add"}) if case["tools"] else (False, frozenset())
        )


def test_every_golden_template_has_its_form(chat_of: OpenChat) -> None:
    for case in GOLDEN:
        tools = chat_of(case["template"]).with_tools.formats.tools
        assert tools and tools.parse.__name__ in case["name"]


HERMES = "<tool_call>{% for t in tools %}{{ t.function.name }}{% endfor %}"


@pytest.mark.parametrize("in_a_file", [True, False])
def test_a_template_of_its_own_for_tools(
    chat_of: OpenChat, tmp_path: Path, in_a_file: bool
) -> None:
    # vllm-project/vllm#5309: Mixtral 8x22B lists a default and a tool_use.
    plain = "{{ messages[0].content }}</think>"
    marked = "{{ messages[0].content }}<eos>" + HERMES
    if in_a_file:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(marked)
    chat = chat_of(plain)
    if not in_a_file:
        (tmp_path / "chat_template.jinja").unlink()
        listed = [{"name": "default", "template": plain}, {"name": "tool_use", "template": marked}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    messages = [{"role": "user", "content": "a<eos>"}]
    alone = chat.render(messages)
    assert (alone.text, alone.reading.thinks) == ("a<eos></think>", True)
    function = {"type": "function", "function": {"name": "add", "parameters": {}}}
    both = chat.render(messages, tools=Tools((function,)))
    assert both.text == "a<eos><eos><tool_call>add"
    assert both.token_ids.count(ByteTokenizer().special_tokens["<eos>"]) == 1, "the template's"
    assert both.reading.tools and both.reading.tools.parse.__name__ == "hermes"
    assert not both.reading.thinks
    chat.check()
    assert chat.notes == ()


@pytest.mark.parametrize("joins", [True, False])
def test_arguments_in_both_shapes(chat_of: OpenChat, joins: bool) -> None:
    written = (
        "{{ 'x' + c['function']['arguments'] }}"
        if joins
        else "x{{ c.function.arguments | tojson }}"
    )
    chat = chat_of("{% for c in messages[0].tool_calls %}" + written + "{% endfor %}")
    for arguments in ('{"a": 1}', {"a": 1}, "", {}):
        call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
        text = chat.render([{"role": "assistant", "tool_calls": [call]}]).text
        assert text == ('x{"a": 1}' if arguments else "x{}")


@pytest.mark.parametrize(
    "calls", [None, "x", [], ["x"], [{"function": "x"}], [{"function": {"name": "f"}}]]
)
def test_calls_of_another_shape_are_the_templates_business(calls: Any) -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    assert with_arguments(messages, False, "messages") == messages


@pytest.mark.parametrize("arguments", ["{", "[]", '{"a": Infinity}', 7, "[" * 10**6, '{"' * 10**6])
def test_arguments_that_are_no_object(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(
        RequestError, match=r"^messages\[0\]\.tool_calls\[0\]\.function\.arguments"
    ) as caught:
        with_arguments([{"role": "assistant", "tool_calls": [call]}], False, "messages")
    assert len(str(caught.value)) < 300


def test_names_of_tokens_in_tools_are_text(chat_of: OpenChat) -> None:
    chat = chat_of(
        "{{ bos_token }}{{ tools | tojson }}{{ messages[0].content }}{{ eos_token }}",
        tool_parser="hermes",
    )
    schema = {
        "type": "object",
        "properties": {"<eos>": {"description": "<bos><BOS>", "enum": ["<eos>", "<", "bos>"]}},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "<eos>", "parameters": schema},
    }
    rendered = chat.render([{"role": "user", "content": "x"}], tools=Tools((tool,)))
    assert rendered.text == f"<bos>{json.dumps([tool])}x<eos>"
    assert [i for i, token in enumerate(rendered.token_ids) if token >= 256] == [
        0,
        len(rendered.token_ids) - 1,
    ]


def test_templates_that_take_no_tools(chat_of: OpenChat) -> None:
    tools = Tools(({"type": "function", "function": {"name": "f", "parameters": {}}},))
    talk = [{"role": "user", "content": "x"}]
    plain = "{{ tools }}{{ messages[0].content }}"
    for template in ("{{ messages[0].content }}", "{{ messages[0].tools }} tools {# tools #}"):
        with pytest.raises(ChatError, match=r"^tools: the chat template of .* takes no tools"):
            chat_of(template, tool_parser="hermes").render(talk, tools=tools)
    with pytest.raises(
        ChatError, match=r"^tools: the format of this model's calls is not known.*--tool-parser"
    ):
        chat_of(plain).render(talk, tools=tools)
    with pytest.raises(ChatError, match="--tool-parser"):
        chat_of(f"{plain}<tool_call>", tool_parser="none").render(talk, tools=tools)
    rendered = chat_of(plain, tool_parser="llama").render(talk, tools=tools)
    assert rendered.reading.names == {"f"}
