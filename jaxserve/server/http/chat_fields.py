"""Parse the fields of chat bodies that hold objects: `messages`, `tools` and `tool_choice`."""

from collections.abc import Sequence
from typing import Any

from jaxserve.chat.messages import OF_THE_MODEL
from jaxserve.chat.tools import AUTO, NONE, REQUIRED, Choice, Tools, check_size, tools_of
from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.errors import UnsupportedError, check_fields
from jaxserve.server.http.ignored import CACHE_HINT
from jaxserve.server.http.types import ChatBody

FIELDS = frozenset({"name", "description", "parameters", "strict"})  # of a function
TOOL = "a function tool"
FUNCTION = "function"  # type of the tools and calls that are supported
NO_CHOICE = Choice()  # what a body without tool_choice asks for


# ---- messages


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each list of text parts joined, with nothing between them.

    The service checks everything else in them.
    """
    if not messages:
        raise RequestError("messages", "is empty; give at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], path: str) -> dict[str, Any]:
    _check_calls(message.get("tool_calls"), f"{path}.tool_calls")
    content = message.get("content")
    # OpenAI's answers have null for an empty text, and come back as history.
    is_empty = "content" in message and content is None and not message.get("tool_calls")
    if is_empty and message.get("role") == OF_THE_MODEL:
        return message | {"content": ""}
    if not isinstance(content, list):
        return message
    for i, part in enumerate(content):
        _check_part(part, f"{path}.content[{i}]")
    return message | {"content": "".join(part["text"] for part in content)}


def _check_calls(calls: Any, path: str) -> None:
    for i, call in enumerate(calls if isinstance(calls, list) else ()):
        kind = call.get("type", FUNCTION) if isinstance(call, dict) else FUNCTION
        if kind != FUNCTION:
            raise UnsupportedError(f"{path}[{i}].type", _only_functions(kind))


def _only_functions(kind: Any) -> str:
    return f'is {kind!r:.80}; only "{FUNCTION}" is supported'


def _check_part(part: Any, path: str) -> None:
    if not isinstance(part, dict):
        raise RequestError(path, 'is no object; give {"type": "text", "text": ...}')
    if part.get("type") != "text":
        raise UnsupportedError(
            f"{path}.type", f"is {part.get('type')!r:.80}; only text is supported"
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{path}.text", "is no string")
    check_fields(part, {"type", "text", CACHE_HINT}, path, "a text part")


# ---- tools


def tools_in(body: ChatBody, limits: Limits) -> Tools | None:
    """Return the tools that the body offers; RequestError with the path of a wrong field."""
    choice = _choice(body.tool_choice)
    return offered(body.tools or (), limits, choice, body.parallel_tool_calls)


def offered(
    tools: Sequence[dict[str, Any]],
    limits: Limits,
    choice: Choice = NO_CHOICE,
    parallel: bool = True,
) -> Tools | None:
    """Return the tools of a body, None without any; errors as in `tools_in`."""
    check_size(tools, limits.max_tools, limits.max_tool_bytes)
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    return tools_of(functions, choice, parallel, lambda i: f"tools[{i}].function")


def _choice(given: Any) -> Choice:
    match given:
        case None:
            return NO_CHOICE
        case "auto" | "none" | "required":
            return Choice(given)
        case {"type": "function", "function": {"name": str(name)}}:
            return Choice(AUTO, name)
    function = '{"type": "function", "function": {"name": ...}}'
    accepted = f'"{AUTO}", "{NONE}", "{REQUIRED}" or {function}'
    raise UnsupportedError("tool_choice", f"is {given!r:.80}; only {accepted} are accepted")


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the function of a tool such as {"type": "function", "function": {...}}."""
    if tool.get("type") != FUNCTION:
        raise UnsupportedError(f"{path}.type", _only_functions(tool.get("type")))
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(
            f"{path}.function", "is no object; give name, description and parameters"
        )
    check_fields(tool, {"type", "function", CACHE_HINT}, path, TOOL)
    check_fields(function, FIELDS | {CACHE_HINT}, f"{path}.function", TOOL)
    return function
