"""Conversations in an order that a template does not take, and messages that it leaves out."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from jaxserve.chat.chat import Chat
from jaxserve.chat.renderer import TemplateRenderer
from jaxserve.chat.turns import forms
from jaxserve.errors import ChatError
from tests.byte_tokenizer import ByteTokenizer

OpenChat = Callable[..., Chat]


class Tokens(ByteTokenizer):
    """Bytes, with more special tokens by name."""

    def __init__(self, names: tuple[str, ...]):
        more = {name: 258 + i for i, name in enumerate(names)}
        self.special_tokens = MappingProxyType({**ByteTokenizer.special_tokens, **more})


@pytest.fixture
def chat_of(tmp_path: Path) -> Iterator[OpenChat]:
    """Return a function that opens a folder with a template and special tokens."""
    chats = []

    def opened(template: str, *special: str) -> Chat:
        folder = tmp_path / str(len(chats))
        folder.mkdir()
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        chats.append(Chat(folder, Tokens(special)))
        return chats[-1]

    yield opened
    for chat in chats:
        chat.close()


def said(*turns: str) -> list[dict[str, Any]]:
    """Return messages of "role: text"."""
    pairs = [turn.split(": ", 1) for turn in turns]
    return [{"role": role, "content": text} for role, text in pairs]


def test_forms_of_a_conversation() -> None:
    messages = said("system: a", "system: b", "user: c", "system: d", "assistant: e", "system: f")
    assert list(forms(messages)) == [
        messages,
        said("system: a\n\nb", "user: c", "system: d", "assistant: e", "system: f"),
        said("system: a\n\nb", "user: c\n\nd", "assistant: e", "user: f"),
        said("user: a\n\nb\n\nc\n\nd", "assistant: e", "user: f"),
    ]
    messages = said("developer: a", "system: b", "user: c", "tool: d", "system: e", "user: f")
    assert list(forms(messages)) == [
        messages,
        said("developer: a\n\nb", "user: c", "tool: d", "system: e", "user: f"),
        said("developer: a\n\nb", "user: c", "tool: d", "user: e\n\nf"),
        said("developer: a\n\nb", "user: c", "tool: d\n\ne\n\nf"),
        said("user: a\n\nb\n\nc", "tool: d", "user: e\n\nf"),
        said("user: a\n\nb\n\nc", "tool: d\n\ne\n\nf"),
    ]


def test_empty_messages_and_thoughts_in_forms() -> None:
    assert list(forms(said("system:  ", "user: a")))[-1] == said("user: a")
    thinks = said("assistant: a", "assistant: <think>b</think>c")
    assert list(forms(thinks)) == [thinks]  # joined, `a` would be a thought


def test_a_conversation_of_turns_has_one_form() -> None:
    messages = said("user: a", "assistant: b", "user: c")
    assert list(forms(messages)) == [messages]


def test_messages_with_fields_that_the_template_reads_are_never_joined() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    named = {"role": "user", "content": "a", "name": "Ann"}
    results = [{"role": "tool", "content": "1", "tool_call_id": each} for each in "ab"]
    messages = [named, named, call, {"role": "assistant", "content": "b"}, *results]
    assert list(forms(messages, {"name", "tool_calls", "tool_call_id"})) == [messages]
    assert list(forms(messages, {"tool_calls"}))[-1][0] == named | {"content": "a\n\na"}


# Codex begins with two messages of the developer and two of the user; Claude Code's harness speaks
# in the middle.
CODEX = said("developer: Rules.", "developer: More.", "user: On Linux.", "user: Which day is it?")
CLAUDE = said(
    "system: You help.", "user: Hi!", "assistant: Yes?", "system: Be brief.", "user: Day?"
)
AT_THE_END = said("user: Which day is it?", "system: Be brief.")


def test_every_published_template_takes_what_agents_send(chat_of: OpenChat) -> None:
    data = os.environ.get("JAXSERVE_TEST_DATA")
    if not data:
        pytest.skip("JAXSERVE_TEST_DATA is not set")
    lines = Path(data, "chat_templates", "tgi_golden.jsonl").read_text().splitlines()
    templates = {json.loads(line)["template"] for line in lines}
    assert len(templates) > 20
    for template in templates:
        chat = chat_of(template)
        for messages in (CODEX, CLAUDE, AT_THE_END):
            text = chat.render(messages).text
            # One template writes what the system says at the beginning as well.
            places = [text.rfind(message["content"]) for message in messages]
            assert min(places) >= 0 and places == sorted(places), template


GPT_OSS = (  # its roles: the first message may be the developer's or the system's
    "{% if messages[0].role in ['developer', 'system'] %}# Instructions {{ messages[0].content }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)


def test_a_template_that_knows_the_developer(chat_of: OpenChat) -> None:
    chat = chat_of(GPT_OSS)
    assert chat.render(CODEX).text == (
        "# Instructions Rules.\n\nMore.<user>On Linux.\n\nWhich day is it?"
    )
    assert chat.render(said("system: a", "developer: b", "user: c")).text == (
        "# Instructions a\n\nb<user>c"
    )
    assert chat.render(said("user: a", "developer: b")).text == "<user>a\n\nb"


ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('no turns') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_turns_of_a_template_that_insists(chat_of: OpenChat) -> None:
    chat = chat_of(ALTERNATING)
    assert chat.render(CLAUDE).text == (
        "<user>You help.\n\nHi!<assistant>Yes?<user>Be brief.\n\nDay?"
    )
    with pytest.raises(ChatError, match=r"^messages: the chat template refuses: no turns$"):
        chat.render(said("user: a", "tool: b", "tool: c", "user: d"))


def test_a_template_in_which_results_are_followed_by_answers(chat_of: OpenChat) -> None:
    chat = chat_of(
        "{% for m in messages %}{% if not loop.first and messages[loop.index0 - 1].role == 'tool' "
        "and m.role != 'assistant' %}{{ raise_exception('no turns') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    messages = said("user: a", "assistant: b", "tool: c", "system: d", "user: e")
    assert chat.render(messages).text == "<user>a<assistant>b<tool>c\n\nd\n\ne"


def test_the_error_is_that_of_turns_in_order(chat_of: OpenChat) -> None:
    of_ids = "{% if messages[-1].id != 'a' %}{{ raise_exception('no id') }}{% endif %}"
    with pytest.raises(ChatError, match="refuses: no id"):
        chat_of(ALTERNATING + of_ids).render(said("user: a", "user: b", "tool: c"))


KNOWN = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "{{ m.content.split('</think>')[-1] | trim }}{% endif %}{% endfor %}"
)


def test_a_message_that_is_left_out_is_an_error(chat_of: OpenChat) -> None:
    chat = chat_of(KNOWN)
    left_out = r"^messages\[1\]\.content: the chat template leaves this message of role 'tool' out"
    for text in ("b", "a", "A longer text that is told from others."):
        with pytest.raises(ChatError, match=left_out):
            chat.render(said("user: a", f"tool: {text}", "user: c"))
    with pytest.raises(ChatError, match=left_out):  # though somebody else says the same
        chat.render(said(*(f"{role}: The same long words." for role in ("user", "tool", "user"))))
    with pytest.raises(ChatError, match=r"^turns\[1\]\.content: "):
        chat.render(said("user: a", "narrator: b", "narrator: c"), "turns")
    with pytest.raises(ChatError, match=left_out):  # whatever others' texts look like
        chat_of(KNOWN, "<|1|>").render(said("user: <", "tool: a", "user: 1"))


@pytest.mark.parametrize(
    "messages",
    [
        said("user: a", "tool: ", "tool:  \n", "user: c"),
        said("user: a", "assistant: <think>Hm.</think>", "user: b"),
        said("user: a", "assistant: <think>Let me think of it.</think>\n\nb ", "user: c"),
        said("user: a", "assistant: <think>b</think> c </think> b", "user: c"),
        [{"role": "user", "content": "a"}, {"role": "x", "content": "b", "tool_calls": [{}]}],
    ],
)
def test_what_nobody_misses(chat_of: OpenChat, messages: list[dict[str, Any]]) -> None:
    assert chat_of(KNOWN).render(messages).text.startswith("a")


def test_texts_that_a_template_changes_are_found(chat_of: OpenChat) -> None:
    messages = said("user:  Grüße ", "user: x")
    assert chat_of("{% for m in messages %}{{ m.content | upper }}{% endfor %}").render(messages)
    assert chat_of("{{ messages | tojson }}").render(messages)
    assert chat_of("{% for m in messages %}{{ m.content[:40] }}{% endfor %}").render(
        said("user: a", "tool: A long result of which templates take the beginning only.")
    )
    last = "{% for m in messages %}{{ m.content.split('ANSWER')[-1] }}{% endfor %}"
    assert chat_of(last).render(
        said("user: a", "assistant: Many thoughts about what to say. ANSWER 12.", "user: b")
    )
    ends = (
        "{% for m in messages %}{% if m.content.startswith('<r>') and m.content.endswith('</r>') %}"
        "{{ m.content[3:-4] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert chat_of(ends).render(said("user: <r>x</r>")).text == "x"
    first = "{{ messages[0].content[:3] }}"
    with pytest.raises(ChatError, match="leaves this message of role 'user' out"):
        chat_of(first).render(messages)


def test_keys_of_messages_that_are_pieces_of_tokens(chat_of: OpenChat) -> None:
    chat = chat_of("{{ messages | tojson }}", "<|content|>", "<|role|>", "<|tool_calls|>")
    assert chat.render(said("user: hello")).text == '[{"role": "user", "content": "hello"}]'


def test_an_empty_list_of_calls_is_none(chat_of: OpenChat) -> None:
    answer = {"role": "assistant", "content": "b", "tool_calls": [], "annotations": []}
    text = chat_of("{{ messages | tojson }}").render([answer]).text
    assert text == '[{"role": "assistant", "content": "b"}]'


def test_long_texts_are_rendered_once_and_short_ones_twice(
    chat_of: OpenChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of("{% for m in messages %}{{ m.content }}{% endfor %}")
    chat.render(said("user: a"))
    asked = []
    render = TemplateRenderer.render
    monkeypatch.setattr(
        TemplateRenderer, "render", lambda *args: asked.append(args) or render(*args)
    )
    chat.render(said("user: A text that says a lot.", "assistant: Another text of that kind."))
    assert len(asked) == 1
    chat.render(said("user: A text that says a lot.", "assistant: Short."))
    assert len(asked) == 3


def test_a_template_that_takes_certain_texts_only(chat_of: OpenChat) -> None:
    judging = (
        "{% if messages[0].content != 'Hi' %}{{ raise_exception('rude') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    assert chat_of(judging).render(said("user: Hi")).text == "Hi"
