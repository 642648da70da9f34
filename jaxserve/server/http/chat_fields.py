"""Parse the fields of chat bodies that hold objects: `messages`, `tools` and `tool_choice`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.chat.messages import OF_THE_MODEL
from jaxserve.chat.tools import AUTO, NONE, REQUIRED, Choice, Tools, among, check_size, tools_of
from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.errors import UnsupportedError, check_fields
from jaxserve.server.http.ignored import CACHE_HINT
from jaxserve.server.http.types import ChatBody

FIELDS = frozenset({"name", "description", "parameters", "strict"})  # of a function
TOOL = "a function tool"
ALLOWED = "allowed_tools"  # type of a choice of several tools
FUNCTION = "function"  # type of the tools and calls that are supported
# Name of the text in a part of a message, by the part's type. Clients of /v1/responses know it as
# input_text; a refusal is in OpenAI's answers, which come back as history.
TEXT_IN = {"text": "text", "input_text": "text", "refusal": "refusal"}
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
    return message | {"content": "".join(part[TEXT_IN[part["type"]]] for part in content)}


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
    kind = part.get("type")
    name = TEXT_IN.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise UnsupportedError(f"{path}.type", f"is {kind!r:.80}; only text is supported")
    if not isinstance(part.get(name), str):
        raise RequestError(f"{path}.{name}", "is no string")
    check_fields(part, {"type", name, CACHE_HINT}, path, "a text part")


# ---- tools


def tools_in(body: ChatBody, limits: Limits) -> Tools | None:
    """Return the tools that the body offers; RequestError with the path of a wrong field."""
    given = body.tool_choice
    if isinstance(given, dict) and given.get("type") == ALLOWED:
        allowed = _allowed(given)
        return allowed.among(
            offered(body.tools or (), limits, allowed.choice, body.parallel_tool_calls)
        )
    return offered(body.tools or (), limits, _choice(given), body.parallel_tool_calls)


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
    allowed = f'{{"type": "{ALLOWED}", "{ALLOWED}": {{"mode": ..., "tools": [...]}}}}'
    accepted = f'"{AUTO}", "{NONE}", "{REQUIRED}", {function} and {allowed}'
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


# ---- a choice of several tools


@dataclass(frozen=True)
class _Allowed:
    """A choice of tools by the client.

    `named` maps the paths of the tools' names in the request to the names.
    """

    choice: Choice
    named: dict[str, str]

    def among(self, tools: Tools | None) -> Tools:
        """Return the tools of the request with this choice; RequestError for one that it lacks."""
        known = tools.names if tools else frozenset[str]()
        for path, name in self.named.items():
            if name not in known:
                raise RequestError(path, f"is {name!r:.80}, which is none of the tools")
        assert tools  # as there is a name, which it has
        return among(tools, frozenset(self.named.values()))


def _allowed(given: dict[str, Any]) -> _Allowed:
    """Parse a choice of several tools, in the form of chat completions or of responses."""
    path = "tool_choice"
    if ALLOWED in given:
        check_fields(given, {"type", ALLOWED}, path, "a choice of allowed tools")
        path = f"{path}.{ALLOWED}"
        given = {"type": ALLOWED} | _object(given[ALLOWED], path, "mode and tools")
    check_fields(given, {"type", "mode", "tools"}, path, "a choice of allowed tools")
    mode = given.get("mode")
    tools = given.get("tools")
    if mode not in (AUTO, REQUIRED):
        raise RequestError(f"{path}.mode", f'is {mode!r:.80}; it must be "{AUTO}" or "{REQUIRED}"')
    if not (isinstance(tools, list) and tools):
        raise RequestError(f"{path}.tools", f"is {tools!r:.80}; give a list of at least one tool")
    named = dict(_named(tool, f"{path}.tools[{i}]") for i, tool in enumerate(tools))
    return _Allowed(Choice(mode), named)


def _named(tool: Any, path: str) -> tuple[str, str]:
    """Return path and name of a tool such as {"type": "function", "function": {"name": ...}}."""
    given = _object(tool, path, "type and function")
    if given.get("type") != FUNCTION:
        raise UnsupportedError(f"{path}.type", _only_functions(given.get("type")))
    if FUNCTION in given:
        check_fields(given, {"type", FUNCTION}, path, TOOL)
        path = f"{path}.{FUNCTION}"
        given = _object(given[FUNCTION], path, "name")
    check_fields(given, FIELDS | {"type"}, path, TOOL)
    if not isinstance(name := given.get("name"), str):
        raise RequestError(f"{path}.name", f"is {name!r:.80}; give the name of a tool")
    return f"{path}.name", name


def _object(given: Any, path: str, members: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise RequestError(path, f"is {given!r:.80}; give an object with {members}")
    return given
