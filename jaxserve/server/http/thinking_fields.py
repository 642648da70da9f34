"""Parse the fields of chat bodies that say how to think, in the spellings that clients have."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxserve.chat import TemplateOptions
from jaxserve.errors import RequestError
from jaxserve.server.http.errors import check_fields
from jaxserve.server.http.types import Body, TemplateBody

# Types of `thinking` in Anthropic's API; an adaptive model decides for itself.
TYPES: Mapping[str, bool | None] = MappingProxyType(
    {"enabled": True, "disabled": False, "adaptive": None}
)
# Options by their paths in `thinking`.
PATHS: Mapping[str, str] = MappingProxyType(
    {"enable_thinking": "thinking.type", "thinking_budget": "thinking.budget_tokens"}
)


def template_options(body: TemplateBody) -> TemplateOptions:
    """Return the options of the answer; RequestError names a field as the body does."""
    given = {
        "reasoning_effort": body.reasoning_effort,
        "enable_thinking": body.enable_thinking,
        "thinking_budget": body.thinking_budget,
        "verbosity": body.verbosity,
        "chat_template_kwargs": body.chat_template_kwargs or {},
    }
    for name, value in _in_thinking(body.thinking).items():
        if given[name] not in (None, value):
            problem = f"is {value}, and {name} is {given[name]}; give one of them"
            raise RequestError(PATHS[name], problem)
        given[name] = value
    try:
        return TemplateOptions(**given)
    except RequestError as error:
        name = names_in_body(body).get(error.field, error.field)
        raise RequestError(name, error.problem) from None


def names_in_body(body: TemplateBody) -> dict[str, str]:
    """Return the paths in the body of options that came by other names than their own."""
    given = _in_thinking(body.thinking)
    return {name: path for name, path in PATHS.items() if given.get(name) is not None}


def unread_names(body: Body, unread: Sequence[str]) -> list[str]:
    """Return the paths in the body of what changed nothing, given the names of the options."""
    names = names_in_body(body) if isinstance(body, TemplateBody) else {}
    return [names.get(name, name) for name in unread]


def _in_thinking(thinking: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options in an object such as {"type": "enabled", "budget_tokens": 1024}."""
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in TYPES:
        problem = f"is {kind!r:.80}; it must be one of {', '.join(TYPES)}"
        raise RequestError("thinking.type", problem)
    check_fields(thinking, {"type", "budget_tokens"}, "thinking", "thinking")
    budget = thinking.get("budget_tokens")
    if budget is not None and kind != "enabled":
        raise RequestError("thinking.budget_tokens", f"is given, but the type is {kind}")
    found = {"enable_thinking": TYPES[kind], "thinking_budget": budget}
    return {name: value for name, value in found.items() if value is not None}
