"""Functions that a model may call, and their calls in conversations."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.chat.answers.json_text import parse
from jaxserve.chat.messages import plain, settled
from jaxserve.errors import RequestError

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
AUTO = "auto"
NONE = "none"
REQUIRED = "required"
# The schema of a function without parameters, as OpenAI's API defines it.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tools:
    """Functions that an answer may call.

    `offered` has each as templates expect it: {"type": "function", "function": {...}}. Without
    `parallel` the first call of an answer is kept and the others are dropped. `required` names the
    functions of which one must be called; it is empty where the model is free not to call.
    `strict` names the functions whose calls follow the schema even then. `followed` has schemas
    that calls follow instead of the parameters in `offered`, by function: what the model is shown
    may be shorter.
    """

    offered: tuple[dict[str, Any], ...]
    parallel: bool = True
    required: frozenset[str] = frozenset()
    strict: frozenset[str] = frozenset()
    followed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Names of all functions."""
        return frozenset(tool["function"]["name"] for tool in self.offered)


@dataclass(frozen=True)
class AllowedTools(Tools):
    """Tools of which only some may be called.

    The model is shown all of them, so that the prompt is that of other choices, and what is kept of
    it serves for this one as well.
    """

    allowed: frozenset[str] = field(kw_only=True)

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions that may be called."""
        return self.allowed


def among(tools: Tools, allowed: frozenset[str]) -> AllowedTools:
    """Return tools of which those with the names may be called."""
    return AllowedTools(
        tools.offered,
        tools.parallel,
        tools.required & allowed,
        tools.strict & allowed,
        tools.followed,
        allowed=allowed,
    )


@dataclass(frozen=True)
class Choice:
    """Request's choice of the functions to call.

    `mode` is AUTO (the model decides), NONE, or REQUIRED (at least one). `name` is the one function
    that must be called. `field` is the choice's path in the request, for errors.
    """

    mode: str = AUTO
    name: str | None = None
    field: str = "tool_choice"


def check_size(functions: Sequence[Mapping[str, Any]], max_count: int, max_bytes: int) -> None:
    """Raise RequestError for more functions, or more bytes of them as JSON, than the limits.

    Call it before anything that takes time for each function.
    """
    if len(functions) > max_count:
        raise RequestError(
            "tools", f"has {len(functions)} entries; the limit is {max_count} (--max-tools)"
        )
    size = len(json.dumps(functions, ensure_ascii=False).encode("utf-8", "replace"))
    if size > max_bytes:
        raise RequestError(
            "tools", f"has {size} bytes as JSON; the limit is {max_bytes} (--max-tool-bytes)"
        )


def tools_of(
    functions: Sequence[Mapping[str, Any]],
    choice: Choice,
    parallel: bool,
    path: Callable[[int], str],
) -> Tools | None:
    """Return the tools of a request; None without functions, or where the choice is NONE.

    Each function has a name, and optionally a description, parameters (a JSON schema as plain
    values) and strict. `path` maps a function's index to its path in the request. RequestError
    names the path of the first thing that is wrong, even where the choice is NONE.
    """
    offered = tuple(_tool(function, path(i)) for i, function in enumerate(functions))
    names = set[str]()
    for i, tool in enumerate(offered):
        name = tool["function"]["name"]
        if name in names:
            raise RequestError(
                f"{path(i)}.name", f"is {name!r}, the name of another function; give each its own"
            )
        names.add(name)
    strict = frozenset(function["name"] for function in functions if function.get("strict"))
    required = _required(names, choice)
    return Tools(offered, parallel, required, strict) if offered and choice.mode != NONE else None


def _required(names: set[str], choice: Choice) -> frozenset[str]:
    """Return the functions of which one must be called; raise RequestError for an unknown one."""
    if choice.name is not None:
        if choice.mode == NONE:
            raise RequestError(
                choice.field, f'is {choice.name!r:.80} beside "{NONE}"; leave out one of them'
            )
        if choice.name not in names:
            raise RequestError(choice.field, f"is {choice.name!r:.80}, which is none of the tools")
        return frozenset({choice.name})
    if choice.mode == REQUIRED and not names:
        raise RequestError(choice.field, f'is "{REQUIRED}" without tools; leave it out')
    return frozenset(names) if choice.mode == REQUIRED else frozenset()


def _tool(function: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return one function as templates expect it; raise RequestError for a malformed one."""
    name = function.get("name")
    description = function.get("description")
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        problem = f"is {name!r:.80}; give 1 to 128 letters, digits, underscores, dots or dashes"
        raise RequestError(f"{path}.name", problem)
    if not isinstance(description, str | None):
        raise RequestError(f"{path}.description", f"is {description!r:.80}; it must be a string")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise RequestError(
            f"{path}.parameters", f"is {parameters!r:.80}; give a JSON schema, an object"
        )
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(
            f"{path}.strict", f"is {function['strict']!r:.80}; it must be true or false"
        )
    offered: dict[str, Any] = {"name": name}
    if description is not None:
        offered["description"] = plain(description, f"{path}.description")
    # Parameters come last: templates write the members in this order.
    offered["parameters"] = NO_PARAMETERS
    if parameters is not None:
        offered["parameters"] = plain(parameters, f"{path}.parameters")
    return {"type": "function", "function": offered}


def with_arguments(
    messages: list[dict[str, Any]], as_text: bool, name: str
) -> list[dict[str, Any]]:
    """Return the messages with the arguments of calls all as JSON text, or all as objects.

    `name` is the messages' path in the request. RequestError is raised for arguments that are
    neither an object nor its JSON text.
    """

    def call_of(call: Any, path: str) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        arguments = _arguments(function["arguments"], as_text, f"{path}.function.arguments")
        return call | {"function": function | {"arguments": arguments}}

    def message_of(message: dict[str, Any], path: str) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return message
        converted = [call_of(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
        return message | {"tool_calls": converted}

    return [message_of(message, f"{name}[{i}]") for i, message in enumerate(messages)]


def _arguments(given: object, as_text: bool, path: str) -> object:
    """Return the arguments of one call as JSON text or as an object."""
    try:
        found = parse(given or "{}") if isinstance(given, str) else given
    except ValueError as error:
        raise RequestError(path, f"is not the JSON text of an object: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(path, f"is {given!r:.80}; give the JSON text of an object")
    if not as_text:
        return plain(settled(found), path)
    if isinstance(given, str) and given:
        return given
    return json.dumps(found, ensure_ascii=False)
