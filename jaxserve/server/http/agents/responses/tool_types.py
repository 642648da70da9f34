"""Tools in requests to /v1/responses, with every field of openai-python 3.57.0."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from jaxserve.server.http.agents.listed import Listed
from jaxserve.server.http.field_types import Objects, Text

TOOL_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "allowed_callers": "which part of OpenAI's service may call: there is one here",
        "async": "whether the tool runs beside the conversation: its result is in the input or not",
        "defer_loading": "whether the model searches for the tool: it sees all tools at once",
        "output_schema": "what the tool returns: its results are texts to the model",
        "cache_control": "where a prefix that is shared ends: the cache finds it out",
    }
)


class FunctionTool(Listed):
    what: ClassVar[str] = "a function tool"
    place: ClassVar[str] = "tools."
    ignored: ClassVar[Mapping[str, str]] = TOOL_FIELDS

    type: Text
    name: Any = None  # tools_of checks what a function has
    description: Any = None
    parameters: Any = None
    strict: Any = None


class CustomTool(Listed):
    what: ClassVar[str] = "a custom tool"
    place: ClassVar[str] = "tools."
    ignored: ClassVar[Mapping[str, str]] = TOOL_FIELDS

    type: Text
    name: Any = None
    description: Text | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(Listed):
    what: ClassVar[str] = "a namespace of tools"
    place: ClassVar[str] = "tools."

    type: Text
    name: Text
    description: Text | None = None
    tools: Objects


class CustomFormat(Listed):
    what: ClassVar[str] = "the format of a custom tool"
    place: ClassVar[str] = "tools.format."

    type: Text
    syntax: Text | None = None
    definition: Text | None = None


# Types of tools that OpenAI runs itself, or of which its models know what they are.
BUILT_IN = frozenset(
    {
        *("file_search", "computer", "computer_use_preview", "computer_use", "mcp"),
        *("web_search", "web_search_2025_08_26", "web_search_preview"),
        *("web_search_preview_2025_03_11", "code_interpreter", "programmatic_tool_calling"),
        *("image_generation", "local_shell", "shell", "tool_search", "apply_patch"),
    }
)
