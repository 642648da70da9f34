"""Parse the tools of a request: functions, namespaces of them, and custom tools."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jaxserve.chat.tools import AUTO, NONE, REQUIRED, Choice, Tools, among, check_size, tools_of
from jaxserve.chat.turns import BETWEEN
from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Notes, named_type, parsed
from jaxserve.server.http.agents.responses.custom_tools import custom_function
from jaxserve.server.http.agents.responses.tool_types import (
    BUILT_IN,
    CustomTool,
    FunctionTool,
    NamespaceTool,
)
from jaxserve.server.http.errors import UnsupportedError

FUNCTION = "function"
CUSTOM = "custom"
FIELD = "tool_choice"


class Origin(NamedTuple):
    """Tool of the request that a function of the prompt stands for."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass
class RequestTools:
    """Tools of a request.

    `origins` has the tool of each function that the model sees, by name, and `followed` the schemas
    that calls follow instead of the parameters that the model sees.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    followed: dict[str, dict[str, Any]] = field(default_factory=dict)
    expression_bytes: int = 0  # of the grammars of custom tools, as regular expressions

    def add(
        self,
        function: dict[str, Any],
        origin: Origin,
        path: str,
        followed: dict[str, Any] | None = None,
    ) -> None:
        """Add a function that the model sees; a name that is none is refused later."""
        self.functions.append(function)
        self.paths.append(path)
        if isinstance(function["name"], str):
            self.origins[function["name"]] = origin
            if followed is not None:
                self.followed[function["name"]] = followed


def name_shown(name: str, namespace: str | None) -> str:
    """Return the name under which the model sees a tool."""
    return f"{namespace}__{name}" if namespace else name


def read_tools(given: Sequence[dict[str, Any]], limits: Limits, notes: Notes) -> RequestTools:
    """Return the tools that the model sees; those that OpenAI runs itself are noted as ignored.

    RequestError has the path of what is wrong.
    """
    check_size(given, limits.max_tools, limits.max_tool_bytes)
    found = RequestTools()
    for i, tool in enumerate(given):
        _read(tool, f"tools[{i}]", None, found, limits, notes)
    check_size(found.functions, limits.max_tools, limits.max_tool_bytes)
    return found


def choose(tools: RequestTools, given: Any, parallel: bool, notes: Notes) -> Tools | None:
    """Return the tools with the request's choice among them; None where none may be called."""

    def chosen(choice: Choice) -> Tools | None:
        found = tools_of(tools.functions, choice, parallel, tools.paths.__getitem__)
        return replace(found, followed=tools.followed) if found else None

    match given:
        case None:
            return chosen(Choice())
        case "auto" | "none" | "required":
            return chosen(Choice(given))
        case {"type": "function" | "custom", "name": str(name)}:
            return chosen(Choice(AUTO, name_shown(name, given.get("namespace"))))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = _allowed(tools, allowed, notes)
            offered = chosen(Choice(mode))
            return among(offered, names) if offered else None
    accepted = (
        f'"{AUTO}", "{NONE}", "{REQUIRED}", {{"type": "function" or "custom", "name": ...}} and '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}'
    )
    raise UnsupportedError(FIELD, f"is {given!r:.80}; only {accepted} are accepted")


def _allowed(tools: RequestTools, given: list[Any], notes: Notes) -> frozenset[str]:
    """Return the names of allowed tools; built-in ones are noted as ignored."""
    names = set[str]()
    for i, tool in enumerate(given):
        path = f"{FIELD}.tools[{i}]"
        kind = named_type(tool, path)
        if kind not in (FUNCTION, CUSTOM):
            _drop(kind, f"{path}.type", notes)
            continue
        name = tool.get("name")
        shown = name_shown(name, tool.get("namespace")) if isinstance(name, str) else None
        if shown not in tools.origins:
            raise RequestError(f"{path}.name", f"is {name!r:.80}, which is none of the tools")
        names.add(shown)
    if not names:
        raise RequestError(f"{FIELD}.tools", "has no tool that this server can offer")
    return frozenset(names)


def _read(
    tool: Any,
    path: str,
    namespace: str | None,
    found: RequestTools,
    limits: Limits,
    notes: Notes,
) -> None:
    """Add one tool of the request, or those of a namespace."""
    kind = named_type(tool, path)
    match kind:
        case "function":
            function = parsed(FunctionTool, tool, notes, path)
            _add_function(function, path, namespace, found)
        case "custom":
            custom = parsed(CustomTool, tool, notes, path)
            _add_custom(custom, path, namespace, found, limits, notes)
        case "namespace" if namespace is None:
            _read_group(parsed(NamespaceTool, tool, notes, path), path, found, limits, notes)
        case _:
            _drop(kind, f"{path}.type", notes)


def _read_group(
    group: NamespaceTool, path: str, found: RequestTools, limits: Limits, notes: Notes
) -> None:
    """Add the tools of a namespace, whose description precedes that of the first one."""
    first = len(found.functions)
    for i, inner in enumerate(group.tools):
        _read(inner, f"{path}.tools[{i}]", group.name, found, limits, notes)
    if not group.description or first == len(found.functions):
        return
    function = found.functions[first]
    own = function["description"]
    if own is None or isinstance(own, str):
        function["description"] = BETWEEN.join(filter(None, (group.description, own)))


def _drop(kind: str, path: str, notes: Notes) -> None:
    """Note a tool of a type that this server has not got, or refuse it."""
    if kind in BUILT_IN:
        notes.add(f"tools.{kind}")
    else:
        notes.take_unknown(f"tools.{kind}", path, kind)


def _add_function(
    tool: FunctionTool, path: str, namespace: str | None, found: RequestTools
) -> None:
    given = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    if namespace and isinstance(tool.name, str):
        given["name"] = name_shown(tool.name, namespace)
    found.add(given, Origin(str(tool.name), namespace, False), path)


def _add_custom(
    tool: CustomTool,
    path: str,
    namespace: str | None,
    found: RequestTools,
    limits: Limits,
    notes: Notes,
) -> None:
    most = limits.max_grammar_bytes - found.expression_bytes
    function, followed, size = custom_function(tool, path, most, notes)
    found.expression_bytes += size
    if namespace and isinstance(tool.name, str):
        function["name"] = name_shown(tool.name, namespace)
    found.add(function, Origin(str(tool.name), namespace, True), path, followed)
