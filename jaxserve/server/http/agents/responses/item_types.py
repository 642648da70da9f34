"""Items in the input of /v1/responses, with every field of openai-python 3.57.0."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from jaxserve.server.http.agents.listed import Listed
from jaxserve.server.http.field_types import Text


class Item(Listed):
    """An item of the input; ids and states of items say nothing to a model."""

    place: ClassVar[str] = "input."

    type: Text | None = None
    id: Any = None
    status: Any = None


class Message(Item):
    what: ClassVar[str] = "a message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Any
    phase: Any = None  # of an answer: whether it is a comment; templates know no such thing


class ReasoningItem(Item):
    what: ClassVar[str] = "a reasoning item"
    summary: Any = None
    content: Any = None
    encrypted_content: Text | None = None


CALL_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "async": "whether the tool runs beside the conversation: its result is in the input or not",
        "caller": "which part of OpenAI's service called",
    }
)


class FunctionCall(Item):
    what: ClassVar[str] = "a function_call item"
    ignored: ClassVar[Mapping[str, str]] = CALL_FIELDS

    name: Text
    arguments: Text
    call_id: Text
    namespace: Text | None = None


class CustomCall(Item):
    what: ClassVar[str] = "a custom_tool_call item"
    ignored: ClassVar[Mapping[str, str]] = CALL_FIELDS

    name: Text
    input: Text
    call_id: Text
    namespace: Text | None = None


class CallOutput(Item):
    what: ClassVar[str] = "an output of a call"
    ignored: ClassVar[Mapping[str, str]] = CALL_FIELDS

    call_id: Text
    output: Any
    name: Any = None  # of the function, which call_id says as well
    namespace: Any = None


# Types that say the same of a built-in tool, a file or the state of OpenAI's service.
OTHER_ITEMS = frozenset(
    {
        *("file_search_call", "computer_call", "computer_call_output", "web_search_call"),
        *("tool_search_call", "tool_search_output", "additional_tools", "configuration_update"),
        *("compaction", "compaction_trigger", "image_generation_call", "code_interpreter_call"),
        *("local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_call"),
        *("mcp_approval_request", "mcp_approval_response", "item_reference"),
        *("program", "program_output"),
    }
)


class TextPart(Listed):
    """A text in a message, in thoughts or in the output of a call."""

    what: ClassVar[str] = "a text"
    place: ClassVar[str] = "content."
    ignored: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "prompt_cache_breakpoint": "where a prefix that is shared ends: the cache finds it out",
            "cache_control": "where a prefix that is shared ends: the cache finds it out",
        }
    )

    type: Text
    text: Text
    annotations: Any = None  # of an answer, as those below
    logprobs: Any = None


class Refusal(Listed):
    what: ClassVar[str] = "a refusal"
    place: ClassVar[str] = "content."

    type: Text
    refusal: Text
