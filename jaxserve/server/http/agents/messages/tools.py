"""Tools of Anthropic's API as functions that the model may call."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxserve.chat.tools import AUTO, NONE, REQUIRED, Choice, Tools, check_size, tools_of
from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Notes, json_of, named_type, parsed
from jaxserve.server.http.agents.messages.blocks import Block
from jaxserve.server.http.agents.messages.types import ConversationBody, Reasons, ToolChoice

CUSTOM = "custom"  # type of the tools that clients run themselves
DIRECT = "direct"  # caller of a tool: the model
EXAMPLES = "Examples of its input, as JSON:"
# Types of tools that Anthropic's servers run, or that its models know by heart.
BUILT_IN = frozenset(
    {
        *("advisor_20260301", "bash_20241022", "bash_20250124", "browser_toolset_20260801"),
        *("code_execution_20250522", "code_execution_20250825"),
        *("code_execution_20260120", "code_execution_20260521"),
        *("computer_20241022", "computer_20250124", "computer_20251124"),
        *("computer_toolset_20260801", "mcp_toolset", "memory_20250818"),
        *("text_editor_20241022", "text_editor_20250124"),
        *("text_editor_20250429", "text_editor_20250728"),
        *("tool_search_tool_bm25", "tool_search_tool_bm25_20251119"),
        *("tool_search_tool_regex", "tool_search_tool_regex_20251119"),
        *("web_fetch_20250910", "web_fetch_20260209", "web_fetch_20260309", "web_fetch_20260318"),
        *("web_search_20250305", "web_search_20260209", "web_search_20260318"),
    }
)
MODES: Mapping[str, str] = {"auto": AUTO, "any": REQUIRED, "tool": AUTO, "none": NONE}


class CustomTool(Block):
    """A tool that the client runs."""

    what: ClassVar[str] = "a tool"
    place: ClassVar[str] = "tools."
    ignored: ClassVar[Reasons] = {
        "eager_input_streaming": "how inputs are cut into pieces: each comes whole",
        "defer_loading": "whether the tool is hidden until a search finds it: there is no search, "
        "and the model sees all tools",
    }

    type: str = CUSTOM
    # tools_of checks these.
    name: Any = None
    description: Any = None
    input_schema: Any = None
    strict: Any = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None

    def as_function(self) -> dict[str, Any]:
        """Return the function; examples of its input are the end of its description."""
        given = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        if self.input_examples:
            lines = [EXAMPLES, *map(json_of, self.input_examples)]
            if isinstance(self.description, str):
                lines = [self.description, "", *lines]
            given["description"] = "\n".join(lines)
        return given


def tools_in(body: ConversationBody, limits: Limits, notes: Notes) -> Tools | None:
    """Return the tools that the body offers, None without any.

    Tools of BUILT_IN, and those that only code may call, are left out and noted. RequestError has
    the path of what is wrong.
    """
    check_size(body.tools, limits.max_tools, limits.max_tool_bytes)
    functions = list[dict[str, Any]]()
    paths = list[str]()
    for i, given in enumerate(body.tools):
        path = f"tools[{i}]"
        tool = _tool(given, path, notes)
        if tool:
            functions.append(tool.as_function())
            paths.append(path)
    choice = body.tool_choice or ToolChoice.model_construct(type="auto")
    _check_choice(choice, [function["name"] for function in functions])
    chosen = Choice(MODES[choice.type], choice.name if choice.type == "tool" else None)
    try:
        return tools_of(functions, chosen, not choice.disable_parallel_tool_use, lambda i: paths[i])
    except RequestError as error:
        raise error.rename(_path_in_body(error.field, paths)) from None


def _tool(given: dict[str, Any], path: str, notes: Notes) -> CustomTool | None:
    """Return a tool that the model may call; None for another one, which is noted."""
    kind = named_type(given, path, CUSTOM)
    if kind in BUILT_IN:
        notes.add(f"tools.{kind}")
        return None
    if kind != CUSTOM:
        notes.take_unknown(f"tools.{kind}", f"{path}.type", kind)
        return None
    tool = parsed(CustomTool, given, notes, path)
    if tool.input_schema is None:
        raise RequestError(f"{path}.input_schema", "is missing; give a JSON schema, an object")
    if tool.allowed_callers is not None and DIRECT not in tool.allowed_callers:
        notes.add("tools.allowed_callers")
        return None
    return tool


def _check_choice(choice: ToolChoice, names: Sequence[str]) -> None:
    """Raise RequestError for a choice of a tool that cannot be called."""
    path = "tool_choice"
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError(f"{path}.name", "is missing; give the name of a tool")
        if choice.name not in names:
            problem = f"is {choice.name!r:.80}, which is none of the tools that can be called here"
            raise RequestError(f"{path}.name", problem)
    elif choice.name is not None:
        raise RequestError(f"{path}.name", f'is given, but the type is "{choice.type}"')
    elif choice.type == "any" and not names:
        problem = 'is "any" without a tool that can be called here; leave it out'
        raise RequestError(f"{path}.type", problem)


def _path_in_body(field: str, paths: Sequence[str]) -> str:
    """Return the path of a tool's member in the body."""
    for path in paths:
        if field.startswith(f"{path}.parameters"):
            return field.replace(".parameters", ".input_schema", 1)
    return field
