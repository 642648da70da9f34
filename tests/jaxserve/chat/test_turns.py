"""Conversations in an order that a template does not take, and messages that it leaves out."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.chat.chat import Chat
from jaxserve.chat.turns import forms
from jaxserve.errors import ChatError
from tests.byte_tokenizer import ByteTokenizer

OpenChat = Callable[[str], Chat]


@pytest.fixture
def chat_of(tmp_path: Path) -> Iterator[OpenChat]:
    """Return a function that opens a folder with this template; all are closed at the end."""
    chats = []

    def opened(template: str) -> Chat:
        folder = tmp_path / str(len(chats))
        folder.mkdir()
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        chats.append(Chat(folder, ByteTokenizer()))
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


def test_a_conversation_of_turns_has_one_form() -> None:
    messages = said("user: a", "assistant: b", "user: c")
    assert list(forms(messages)) == [messages]


def test_messages_with_other_fields_are_never_joined() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    named = {"role": "user", "content": "a", "name": "Ann"}
    results = [{"role": "tool", "content": "1", "tool_call_id": each} for each in "ab"]
    messages = [named, named, call, {"role": "assistant", "content": "b"}, *results]
    assert list(forms(messages)) == [messages]


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
        chat.render(said("user: a", "narrator: b"), "turns")


@pytest.mark.parametrize(
    "messages",
    [
        said("user: a", "tool: ", "tool:  \n", "user: c"),
        said("user: a", "assistant: <think>Hm.</think>", "user: b"),
        said("user: a", "assistant: <think>Let me think of it.</think>\n\nb ", "user: c"),
        [{"role": "user", "content": "a"}, {"role": "x", "content": "b", "tool_calls": [{}]}],
    ],
)
def test_what_nobody_misses(chat_of: OpenChat, messages: list[dict[str, Any]]) -> None:
    assert chat_of(KNOWN).render(messages).text.startswith("a")


def test_texts_that_a_template_changes_are_found(chat_of: OpenChat) -> None:
    messages = said("user:  Grüße ", "user: x")
    assert chat_of("{% for m in messages %}{{ m.content | upper }}{% endfor %}").render(messages)
    assert chat_of("{{ messages | tojson }}").render(messages)
    first = "{{ messages[0].content[:3] }}"
    with pytest.raises(ChatError, match="leaves this message of role 'user' out"):
        chat_of(first).render(messages)


def test_a_template_that_judges_what_is_said_is_not_asked_twice(chat_of: OpenChat) -> None:
    judging = (
        "{% if messages[0].content != 'Hi' %}{{ raise_exception('rude') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    assert chat_of(judging).render(said("user: Hi")).text == "Hi"
