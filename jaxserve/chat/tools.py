"""Functions that a model may call: as clients offer them, as templates want them, and their calls
in a conversation.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.chat.answers.json_text import parse
from jaxserve.chat.messages import plain
from jaxserve.errors import RequestError

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
AUTO, NONE, REQUIRED = "auto", "none", "required"
NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
}  # OpenAI's meaning of parameters left out


@dataclass(frozen=True)
class Tools:
    """What may be called in an answer. offered: as templates want them: {"type": "function",
    "function": {...}}.

    parallel: in any number; otherwise the first call of an answer is kept, and the others are
    dropped. required: those of which one has to be called, by name; none where the model is free
    to. strict: those whose calls follow the schema even then.
    """

    offered: tuple[dict[str, Any], ...]
    parallel: bool = True
    required: frozenset[str] = frozenset()
    strict: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.offered)


@dataclass(frozen=True)
class Choice:
    """Whether functions are called: AUTO, as the model likes; NONE; REQUIRED, one at least. name:
    this one.

    field: where the request says so.
    """

    mode: str = AUTO
    name: str | None = None
    field: str = "tool_choice"


def check_size(functions: Sequence[Mapping[str, Any]], most: int, most_bytes: int) -> None:
    """RequestError for more functions, or more bytes of them as JSON: before anybody looks at each
    of them.
    """
    if len(functions) > most:
        raise RequestError(
            "tools", f"has {len(functions)} entries; the limit is {most} (--max-tools)"
        )
    size = len(json.dumps(functions, ensure_ascii=False).encode("utf-8", "replace"))
    if size > most_bytes:
        raise RequestError(
            "tools", f"has {size} bytes as JSON; the limit is {most_bytes} (--max-tool-bytes)"
        )


def tools_of(
    functions: Sequence[Mapping[str, Any]],
    choice: Choice,
    parallel: bool,
    path: Callable[[int], str],
) -> Tools | None:
    """What a request offers; None for nothing, and for a choice of none: the template is not told
    then.

    functions: name, and if given description, parameters (a JSON schema as plain values) and
    strict. path: of each of them in the request. RequestError with the path of what is wrong.
    """
    offered = tuple(_tool(function, path(i)) for i, function in enumerate(functions))
    names = set[str]()
    for i, tool in enumerate(offered):
        name = tool["function"]["name"]
        if name in names:
            raise RequestError(
                f"{path(i)}.name", f"is {name!r}, as that of another function; give each its own"
            )
        names.add(name)
    strict = frozenset(function["name"] for function in functions if function.get("strict"))
    required = _required(names, choice)
    return Tools(offered, parallel, required, strict) if offered and choice.mode != NONE else None


def _required(names: set[str], choice: Choice) -> frozenset[str]:
    """The functions of which one has to be called; RequestError for one that is not offered."""
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
    name, description = function.get("name"), function.get("description")
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise RequestError(
            f"{path}.name",
            f"is {name!r:.80}; give 1 to 64 letters, digits, underlines, points, dashes",
        )
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
    told = {} if description is None else {"description": plain(description, f"{path}.description")}
    schema = NO_PARAMETERS if parameters is None else plain(parameters, f"{path}.parameters")
    return {"type": "function", "function": {"name": name, **told, "parameters": schema}}


def with_arguments(
    messages: list[dict[str, Any]], as_text: bool, name: str
) -> list[dict[str, Any]]:
    """The messages, with the arguments of calls as JSON text or as objects, whichever they were.
    name: their path.
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
        return message | {
            "tool_calls": [call_of(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
        }

    return [message_of(message, f"{name}[{i}]") for i, message in enumerate(messages)]


def _arguments(given: object, as_text: bool, path: str) -> object:
    try:
        found = parse(given or "{}") if isinstance(given, str) else given
    except ValueError as error:
        raise RequestError(path, f"is no JSON text of an object: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(path, f"is {given!r:.80}; give the JSON text of an object")
    if not as_text:
        return plain(found, path)
    return given if isinstance(given, str) and given else json.dumps(found, ensure_ascii=False)
