"""Messages of Anthropic's API as a conversation in the form of chat templates."""

import math
import sys
from collections.abc import Sequence
from typing import Any

from jaxserve.chat.answers.json_text import parse
from jaxserve.chat.bounds import MAX_MESSAGES
from jaxserve.chat.earlier_thoughts import GIVEN as THOUGHT
from jaxserve.chat.messages import OF_THE_MODEL, settled
from jaxserve.chat.turns import BETWEEN, SYSTEM, TOOL, USER
from jaxserve.errors import RequestError
from jaxserve.server.http.agents.conversation import Conversation
from jaxserve.server.http.agents.listed import Notes, json_of, parsed
from jaxserve.server.http.agents.messages.blocks import (
    RESULT,
    Block,
    Message,
    RedactedThinkingBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    blocks_of,
)
from jaxserve.server.http.agents.messages.types import ConversationBody
from jaxserve.server.http.agents.turns import MESSAGES
from jaxserve.server.security.seals import SealError, Seals

MAX_BLOCKS = 4 * MAX_MESSAGES  # of all messages
ID_PREFIX = "toolu_"  # of the ids of calls; some templates insist on ids of nine letters
ERROR = "Error: "
UNCHECKED = "thinking.signature"  # name of a signature that another server has made


def conversation_of(
    body: ConversationBody, seals: Seals, notes: Notes, answered: bool
) -> Conversation:
    """Return the conversation of a body; RequestError has the path of what is wrong.

    Texts of one message, of the system prompt and of a result have an empty line between them, and
    those of an answer nothing. A result of a call is a message of its own, where it stands among
    the user's texts. One that is an error begins with "Error: ", unless it says so itself.

    Args:
        answered: Whether the assistant says what comes next, so that the last message cannot be
            its own.
    """
    _check_size(body.messages)
    translation = _Translation(seals, notes)
    translation.add_system(blocks_of(body.system, SYSTEM, "system", notes), "system")
    last_of_user = _last_of_user(body.messages)
    for i, given in enumerate(body.messages):
        translation.add_message(given, f"{MESSAGES}[{i}]", i < last_of_user)
    if answered and body.messages[-1].get("role") == OF_THE_MODEL:
        problem = (
            "is assistant in the last message, and an answer cannot go on from a beginning here; "
            "end with a message of the user"
        )
        raise RequestError(f"{MESSAGES}[{len(body.messages) - 1}].role", problem)
    return translation.found


def _check_size(messages: Sequence[dict[str, Any]]) -> None:
    """Raise RequestError for no message, or too many blocks: each of them takes time."""
    if not messages:
        raise RequestError(MESSAGES, "is empty; give at least one message")
    contents = [message.get("content") for message in messages]
    blocks = sum(len(content) if isinstance(content, list) else 1 for content in contents)
    if blocks > MAX_BLOCKS:
        raise RequestError(MESSAGES, f"has {blocks} blocks; the limit is {MAX_BLOCKS}")


def _last_of_user(messages: Sequence[dict[str, Any]]) -> int:
    """Return the index of the user's last message, -1 without one."""
    return max((i for i, each in enumerate(messages) if each.get("role") == USER), default=-1)


class _Translation:
    """Translation of messages one by one into `found`."""

    def __init__(self, seals: Seals, notes: Notes):
        self.found = Conversation()
        self._seals = seals
        self._notes = notes
        self._calls = set[str]()

    def add_message(self, given: dict[str, Any], path: str, before_user: bool) -> None:
        """Add a message.

        Args:
            before_user: Whether a message of the user comes later.
        """
        kind = SystemMessage if given.get("role") == SYSTEM else Message
        message = parsed(kind, given, self._notes, path)
        is_past = isinstance(message, SystemMessage) and message.clear_at != "never" and before_user
        blocks = blocks_of(message.content, message.role, f"{path}.content", self._notes)
        if message.role == OF_THE_MODEL:
            self._add_answer(blocks, path)
        elif message.role == USER:
            self._add_user(blocks, path)
        elif not is_past:
            self.add_system(blocks, path)

    def add_system(self, blocks: Sequence[tuple[Block, str]], path: str) -> None:
        if blocks:
            self._add(path, role=SYSTEM, content=_joined(blocks))

    def _add_user(self, blocks: Sequence[tuple[Block, str]], path: str) -> None:
        texts = list[tuple[Block, str]]()
        for block, place in blocks:
            if not isinstance(block, ToolResultBlock):
                texts.append((block, place))
                continue
            if texts:
                self._add(path, role=USER, content=_joined(texts))
                texts = []
            self._add_result(block, place)
        if texts or not blocks:
            self._add(path, role=USER, content=_joined(texts))

    def _add_result(self, block: ToolResultBlock, path: str) -> None:
        if block.tool_use_id not in self._calls:
            problem = f"is {block.tool_use_id!r:.80}, which is the id of no tool_use before it"
            raise RequestError(f"{path}.tool_use_id", problem)
        text = _joined(blocks_of(block.content, RESULT, f"{path}.content", self._notes))
        if block.is_error and not text.lower().startswith("error"):
            text = ERROR + text
        self._add(path, role=TOOL, tool_call_id=_own_id(block.tool_use_id), content=text)

    def _add_answer(self, blocks: Sequence[tuple[Block, str]], path: str) -> None:
        thoughts = list[str]()
        texts = list[str]()
        calls = list[dict[str, Any]]()
        for block, place in blocks:
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(self._thought(block, place))
                case ToolUseBlock():
                    self._calls.add(block.id)
                    calls.append(_call(block))
                case RedactedThinkingBlock():
                    self._notes.add(block.type)
                case _:
                    raise AssertionError(f"no block of an answer: {block.type}")
        fields: dict[str, Any] = {"role": OF_THE_MODEL, "content": "".join(texts)}
        if thought := BETWEEN.join(filter(None, thoughts)):
            fields[THOUGHT] = thought
        if calls:
            fields |= {"content": fields["content"] or None, "tool_calls": calls}
        self._add(path, **fields)

    def _thought(self, block: ThinkingBlock, path: str) -> str:
        """Return the text of a thought.

        One without a signature, or with one by another key (of another provider, or of this server
        before it restarted) is accepted as it is. Where the text was left out, the signature is the
        text, sealed. RequestError is raised for a signature of another text.
        """
        if not block.signature:
            return block.thinking
        try:
            if not block.thinking:
                return self._seals.open(block.signature)
            self._seals.check(block.thinking, block.signature)
        except SealError as error:
            if not error.other_key:
                raise RequestError(
                    f"{path}.signature",
                    f"{error}; send the block as it came, or leave out its signature",
                ) from None
            self._notes.add(UNCHECKED)
        return block.thinking

    def _add(self, path: str, **message: Any) -> None:
        self.found.add(message, path)


def _joined(blocks: Sequence[tuple[Block, str]]) -> str:
    """Return the texts of blocks with an empty line between them."""
    texts = [block.text for block, _ in blocks if isinstance(block, TextBlock)]
    return texts[0] if len(texts) == 1 else BETWEEN.join(text for text in texts if text.strip())


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json_of(finite(block.input))}
    return {"id": _own_id(block.id), "type": "function", "function": function}


def _own_id(id: str) -> str:
    """Return the id of a call as the model's parser has made it."""
    return id.removeprefix(ID_PREFIX) or id


def finite(value: Any) -> Any:
    """Return JSON values with the greatest numbers in place of infinite ones.

    Python reads 1e999 as infinite, and JSON has no way to write that.
    """
    match value:
        case float():
            return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)
        case list():
            return [finite(each) for each in value]
        case dict():
            return {key: finite(each) for key, each in value.items()}
        case _:
            return value


def client_id(id: str) -> str:
    """Return the id of a call as clients of Anthropic's API know it."""
    return id if id.startswith(ID_PREFIX) else ID_PREFIX + id


def input_of(arguments: str) -> Any:
    """Return the input of a call from the JSON text of its arguments.

    An object without members stands for arguments that were cut off with the answer, or are nested
    too deep.
    """
    try:
        return settled(finite(parse(arguments)))
    except ValueError:
        return {}
