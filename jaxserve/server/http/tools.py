"""Functions to call, as OpenAI's clients offer them."""

from typing import Any

from jaxserve.chat.tools import AUTO, NONE, REQUIRED, Choice, Tools, check_size, tools_of
from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.errors import UnknownFieldError, UnsupportedError
from jaxserve.server.http.types import ChatBody

FIELDS = frozenset({"name", "description", "parameters", "strict"})


def tools_in(body: ChatBody, limits: Limits) -> Tools | None:
    """What the body offers; RequestError with the path of what is wrong."""
    check_size(body.tools or (), limits.max_tools, limits.max_tool_bytes)
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    choice = _choice(body.tool_choice)
    return tools_of(functions, choice, body.parallel_tool_calls, lambda i: f"tools[{i}].function")


def _choice(given: Any) -> Choice:
    match given:
        case None:
            return Choice()
        case "auto" | "none" | "required":
            return Choice(given)
        case {"type": "function", "function": {"name": str(name)}}:
            return Choice(AUTO, name)
    accepted = f'"{AUTO}", "{NONE}", "{REQUIRED}" or one function'
    raise UnsupportedError("tool_choice", f"is {given!r:.80}; only {accepted} are accepted")


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UnsupportedError(
            f"{path}.type", f'is {tool.get("type")!r:.80}; only "function" is supported'
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(
            f"{path}.function", "is no object; give name, description and parameters"
        )
    for where, given, known in (
        (path, tool, {"type", "function"}),
        (f"{path}.function", function, FIELDS),
    ):
        for name, value in given.items():
            if name not in known and value is not None:
                raise UnknownFieldError(
                    f"{where}.{name:.80}", "is not a field of a function; leave it out"
                )
    return function
