"""Conversations of Anthropic's API as those of chat templates."""

from typing import Any

import pytest

from jaxserve.errors import RequestError
from jaxserve.server.http.agents.listed import Notes, parsed
from jaxserve.server.http.agents.messages.conversation import MAX_BLOCKS, conversation_of
from jaxserve.server.http.agents.messages.types import MessagesBody
from jaxserve.server.security.seals import Seals
from tests.jaxserve.server.http.agents.messages.asking import (
    ASKED,
    CALL,
    HIDDEN,
    HINT,
    PICTURE,
    RESULT,
    THOUGHT,
    answer,
    ask,
    text,
    user,
)

OTHER_KEY = Seals().sign("thought")


def translated(
    *messages: Any, seals: Seals | None = None, **fields: Any
) -> tuple[list[Any], list[str], list[str]]:
    """Return messages for the template, their paths, and names of what was ignored."""
    notes = Notes("ignore")
    body = parsed(MessagesBody, ask(messages=list(messages), **fields), notes)
    found = conversation_of(body, seals or Seals(), notes, answered=True)
    return found.messages, found.paths, list(notes.fields)


def test_a_conversation_of_an_agent() -> None:
    messages, paths, ignored = translated(
        user(text("<reminder>"), text("Add.", **HINT)),
        {"role": "system", "content": "Be short."},
        answer(THOUGHT, text("I "), text("add."), CALL),
        user(RESULT | HINT, text("And?")),
        system=[text("One."), text("Two.", **HINT)],
    )
    call = {
        "id": "a1B2c3D4e",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a":7,"b":5}'},
    }
    assert messages == [
        {"role": "system", "content": "One.\n\nTwo."},
        {"role": "user", "content": "<reminder>\n\nAdd."},
        {"role": "system", "content": "Be short."},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Hm.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "a1B2c3D4e", "content": "12"},
        {"role": "user", "content": "And?"},
    ]
    assert paths == [
        *("system", "messages[0]", "messages[1]", "messages[2]"),
        *("messages[3].content[0]", "messages[3]"),
    ]
    assert ignored == ["cache_control"]


def test_results_stay_where_they_are() -> None:
    made = answer(CALL, CALL | {"id": "other"})
    two = [RESULT, RESULT | {"tool_use_id": "other", "content": [text("a"), text("b")]}]
    messages, paths, _ = translated(*ASKED, made, user(text("x"), two[0], text("y"), two[1]))
    assert [(each["role"], each["content"]) for each in messages[2:]] == [
        *(("user", "x"), ("tool", "12"), ("user", "y"), ("tool", "a\n\nb"))
    ]
    assert messages[1]["content"] is None and messages[-1]["tool_call_id"] == "other"
    assert paths[2:] == [
        *("messages[2]", "messages[2].content[1]", "messages[2]", "messages[2].content[3]")
    ]


@pytest.mark.parametrize(
    "content, told",
    [
        ("no file", "Error: no file"),
        ([text("no file")], "Error: no file"),
        ("Error 5", "Error 5"),
        (None, "Error: "),
    ],
)
def test_a_result_that_is_an_error(content: Any, told: str) -> None:
    result = RESULT | {"content": content, "is_error": True}
    assert translated(*ASKED, answer(CALL), user(result))[0][-1]["content"] == told
    result["is_error"] = False
    assert translated(*ASKED, answer(CALL), user(result))[0][-1]["content"] == told.removeprefix(
        "Error: "
    )


def test_messages_of_the_operator() -> None:
    brief = {"role": "system", "content": "Now.", "clear_at": "next_user_message"}
    kept = {"role": "system", "content": [text("Always.")], "output_config": {}}
    messages, _, ignored = translated(*ASKED, brief, kept, answer(text("12")), *ASKED, brief)
    assert [each["content"] for each in messages] == [
        *("7 plus 5?", "Always.", "12", "7 plus 5?", "Now.")
    ]
    assert ignored == []


@pytest.mark.parametrize(
    "signature, ignored",
    [
        ("", []),
        (None, []),
        pytest.param(OTHER_KEY, ["thinking.signature"], id="other_key"),
        ("c2ln", ["thinking.signature"]),
    ],
)
def test_thoughts_without_a_signature_of_this_server(
    signature: str | None, ignored: list[str]
) -> None:
    thought = {"type": "thinking", "thinking": "thought", "signature": signature}
    messages, _, found = translated(*ASKED, answer(thought, text("12")), *ASKED)
    assert messages[1] == {"role": "assistant", "content": "12", "reasoning_content": "thought"}
    assert found == ignored
    messages, _, found = translated(*ASKED, answer(HIDDEN, text("12")), *ASKED)
    assert messages[1] == {"role": "assistant", "content": "12"}
    assert found == ["redacted_thinking"]


WRONG: list[tuple[list[Any], str]] = [
    ([], "messages is empty; give at least one message"),
    (
        [{"role": "tool", "content": "x"}],
        "messages[0].role must be 'user', 'assistant' or 'system'",
    ),
    ([{"content": "x"}], "messages[0].role is missing"),
    ([{"role": "user"}], "messages[0].content is missing"),
    ([{"role": "user", "content": 5}], "messages[0].content is 5; give a text or a list of blocks"),
    ([user(5)], "messages[0].content[0] is 5; it must be an object"),
    ([user({"text": "x"})], "messages[0].content[0].type is None; it must be a string"),
    ([user({"type": "text"})], "messages[0].content[0].text is missing"),
    (
        [user(text("x"), PICTURE)],
        'messages[0].content[1].type is "image", which is not supported: the model reads text '
        "only; describe the image",
    ),
    (
        [*ASKED, answer(CALL), user(RESULT | {"content": [text("x"), PICTURE]})],
        'messages[2].content[0].content[1].type is "image", which is not supported: the model '
        "reads text only; describe the image",
    ),
    (
        [user({"type": "document", "source": {}})],
        'messages[0].content[0].type is "document", which is not supported: files are not read '
        "here; give their content as text",
    ),
    (
        [*ASKED, answer({"type": "server_tool_use", "id": "x", "name": "y", "input": {}})],
        'messages[1].content[0].type is "server_tool_use", which is not supported: it is of a '
        "tool that only Anthropic's servers run; leave it out",
    ),
    (
        [user(CALL)],
        "messages[0].content[0].type is 'tool_use'; the blocks of a user message are text, "
        "tool_result",
    ),
    (
        [user(RESULT)],
        "messages[0].content[0].tool_use_id is 'toolu_a1B2c3D4e', which is the id of no tool_use "
        "before it",
    ),
    ([*ASKED, answer(CALL | {"input": "x"}), *ASKED], "messages[1].content[0].input must be"),
    (
        [*ASKED, answer(text("It is"))],
        "messages[1].role is assistant in the last message, and an answer cannot go on from a "
        "beginning here; end with a message of the user",
    ),
    (
        [{"role": "system", "content": "x", "output_config": {"effort": "low"}}, *ASKED],
        "messages[0].output_config is not supported: use that of the request",
    ),
    ([user(*[text("x")] * (MAX_BLOCKS + 1))], "messages has 16385 blocks; the limit is 16384"),
]


@pytest.mark.parametrize("messages, problem", WRONG)
def test_wrong_messages(messages: list[Any], problem: str) -> None:
    with pytest.raises(RequestError) as error:
        translated(*messages)
    assert str(error.value).startswith(problem)
