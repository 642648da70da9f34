"""Blocks of content in Anthropic's API: those that are read, and why others are refused."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from jaxserve.errors import RequestError
from jaxserve.server.http.agents.listed import Listed, Notes, named_type, parsed
from jaxserve.server.http.agents.messages.types import Reasons, Values
from jaxserve.server.http.errors import UnsupportedError
from jaxserve.server.http.field_types import Text
from jaxserve.server.http.ignored import CACHE_HINT

RESULT = "tool_result"
NO_IMAGES = "the model reads text only; describe the image"
NO_FILES = "files are not read here; give their content as text"
ELSEWHERE = "it is of a tool that only Anthropic's servers run; leave it out"
MCP = "the server calls no other servers; offer their functions as tools"
TOOL_CHANGES = "the tools are the same in all of a conversation; list them in tools"
# Types of blocks that exist in Anthropic's API and are refused, each with the reason.
REFUSED: Reasons = MappingProxyType(
    {
        "image": NO_IMAGES,
        "browser_state": NO_IMAGES,
        "document": NO_FILES,
        "container_upload": NO_FILES,
        "search_result": "results are not cited here; give their content as text",
        "server_tool_use": ELSEWHERE,
        "web_search_tool_result": ELSEWHERE,
        "web_fetch_tool_result": ELSEWHERE,
        "advisor_tool_result": ELSEWHERE,
        "code_execution_tool_result": ELSEWHERE,
        "bash_code_execution_tool_result": ELSEWHERE,
        "text_editor_code_execution_tool_result": ELSEWHERE,
        "tool_search_tool_result": ELSEWHERE,
        "tool_reference": ELSEWHERE,
        "mcp_tool_use": MCP,
        "mcp_tool_result": MCP,
        "mcp_tool_listing": MCP,
        "tool_addition": TOOL_CHANGES,
        "tool_removal": TOOL_CHANGES,
        "compaction": "it stands for messages that only Anthropic's servers know; send these",
        "fallback": "no other model has answered here; leave it out",
    }
)


class Block(Listed):
    """A part of a message; a hint for caching has the same name in all of them."""

    type: str

    @classmethod
    def _take_other(cls, name: str, value: Any, notes: Notes) -> None:
        if name == CACHE_HINT:
            notes.add(CACHE_HINT)
        else:
            super()._take_other(name, value, notes)


class TextBlock(Block):
    what: ClassVar[str] = "a text block"
    place: ClassVar[str] = "text."
    ignored: ClassVar[Reasons] = {"citations": "sources of an earlier answer: the text has it all"}

    text: Text


class ThinkingBlock(Block):
    what: ClassVar[str] = "a thinking block"
    place: ClassVar[str] = "thinking."

    thinking: str = ""
    signature: str = ""


class RedactedThinkingBlock(Block):
    """A thought that only Anthropic's servers can read."""

    what: ClassVar[str] = "a redacted_thinking block"
    place: ClassVar[str] = "redacted_thinking."

    data: str = ""


class ToolUseBlock(Block):
    what: ClassVar[str] = "a tool_use block"
    place: ClassVar[str] = "tool_use."
    ignored: ClassVar[Reasons] = {
        "caller": "who has called: the model itself",
        "toolset_name": "a set of Anthropic's tools: functions stand alone here",
    }

    id: Text
    name: Text
    input: dict[str, Any]


class ToolResultBlock(Block):
    what: ClassVar[str] = "a tool_result block"
    place: ClassVar[str] = "tool_result."
    ignored: ClassVar[Reasons] = {
        "toolset_name": "a set of Anthropic's tools: functions stand alone here",
    }

    tool_use_id: Text
    content: Any = None  # text, or blocks of it
    is_error: bool = False


# Blocks that are read, by whose they are.
KINDS: Mapping[str, Mapping[str, type[Block]]] = MappingProxyType(
    {
        "user": {"text": TextBlock, RESULT: ToolResultBlock},
        "system": {"text": TextBlock},
        RESULT: {"text": TextBlock},
        "assistant": {
            "text": TextBlock,
            "thinking": ThinkingBlock,
            "redacted_thinking": RedactedThinkingBlock,
            "tool_use": ToolUseBlock,
        },
    }
)


class Message(Listed):
    what: ClassVar[str] = "a message"
    place: ClassVar[str] = "messages."

    role: Literal["user", "assistant", "system"]
    content: Any  # text, or blocks


class SystemMessage(Message):
    """A message of the operator in the middle of a conversation."""

    refused: ClassVar[Reasons] = {"output_config": "use that of the request"}
    only: ClassVar[Values] = {"output_config": ({},)}

    content: Any = None
    clear_at: Literal["never", "next_user_message"] = "never"


def blocks_of(content: Any, whose: str, path: str, notes: Notes) -> list[tuple[Block, str]]:
    """Return the blocks of a content, a text or a list, each with its path in the body.

    Args:
        whose: Key of KINDS.
    """
    if isinstance(content, str):
        return [(TextBlock.model_construct(type="text", text=content), path)]
    if content is None:
        return []
    if not isinstance(content, list):
        raise RequestError(path, f"is {content!r:.80}; give a text or a list of blocks")
    places = [f"{path}[{i}]" for i in range(len(content))]
    return [
        (_block(given, whose, place, notes), place)
        for given, place in zip(content, places, strict=True)
    ]


def _block(given: Any, whose: str, path: str, notes: Notes) -> Block:
    kind = named_type(given, path)
    kinds = KINDS[whose]
    if kind in kinds:
        return parsed(kinds[kind], given, notes, path)
    raise UnsupportedError(f"{path}.type", _refusal(kind, whose))


def _refusal(kind: str, whose: str) -> str:
    if kind in REFUSED:
        return f'is "{kind}", which is not supported: {REFUSED[kind]}'
    accepted = ", ".join(KINDS[whose])
    of = whose if whose == RESULT else f"{whose} message"
    return f"is {kind!r:.80}; the blocks of a {of} are {accepted}"
