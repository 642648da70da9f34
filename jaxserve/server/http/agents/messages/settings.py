"""Fields of Anthropic's API that say how to answer, in the terms of the service."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.chat import TemplateOptions
from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.server.http.agents.listed import Notes, named_type
from jaxserve.server.http.agents.messages.types import (
    ContextManagement,
    ConversationBody,
    MessagesBody,
    Thinking,
)
from jaxserve.server.http.agents.sampling import sampling_of
from jaxserve.server.http.agents.turns import names_of_body
from jaxserve.server.http.errors import UnsupportedError
from jaxserve.structure import Structure

# Paths in a body of what has another name in the service.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "enable_thinking": "thinking.type",
        "thinking_budget": "thinking.budget_tokens",
    }
)
# Types of `thinking`; with those of None the template decides.
THINKS: Mapping[str, bool | None] = MappingProxyType(
    {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
)
# Edits that Anthropic's servers make beyond a number of tokens; a prompt that is too long is an
# error here, on which clients shorten it themselves.
EDITS = frozenset({"clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112"})
SCHEMA = "json_schema"


def names_of(body: ConversationBody) -> Mapping[str, str]:
    """Return the paths in this body of what has another name in the service."""
    if isinstance(body, MessagesBody) and body.stop is not None:
        return {name: path for name, path in NAMES.items() if name != "stop"}
    return NAMES


def options_of(body: ConversationBody, notes: Notes) -> TemplateOptions:
    """Return how the answer is thought out; RequestError has the path of what is wrong."""
    thinking = body.thinking
    if thinking:
        _check_thinking(thinking, notes)
    if body.context_management:
        _note_edits(body.context_management, notes)
    with names_of_body(NAMES, ()):
        return TemplateOptions(
            reasoning_effort=body.output_config.effort if body.output_config else None,
            enable_thinking=THINKS[thinking.type] if thinking else None,
            thinking_budget=thinking.budget_tokens if thinking else None,
            verbosity=body.verbosity,
            chat_template_kwargs=body.chat_template_kwargs,
        )


def _check_thinking(thinking: Thinking, notes: Notes) -> None:
    if thinking.budget_tokens is not None and thinking.type != "enabled":
        problem = f'is given, but the type is "{thinking.type}"; leave it out'
        raise RequestError("thinking.budget_tokens", problem)
    if thinking.type == "between_tools":
        notes.add("thinking.type")  # where to think is for the model to say
    if thinking.display == "updates":
        notes.add("thinking.display")  # thoughts are shown as they are


def _note_edits(management: ContextManagement, notes: Notes) -> None:
    for i, edit in enumerate(management.edits):
        path = f"context_management.edits[{i}]"
        kind = named_type(edit, path)
        name = f"context_management.{kind}"
        if kind in EDITS:
            notes.add(name)
        else:
            notes.take_unknown(name, f"{path}.type", kind)


def params_of(body: MessagesBody, defaults: SamplingFields, notes: Notes) -> SamplingParams:
    """Return the sampling parameters of a body; RequestError has the path of what is wrong.

    Args:
        defaults: Values of parameters that the body leaves open.
    """
    if body.stop is not None and body.stop_sequences is not None:
        raise RequestError("stop", "is given beside stop_sequences; give one of them")
    return sampling_of(
        body,
        defaults,
        names_of(body),
        max_tokens=body.max_tokens,
        stop=body.stop if body.stop_sequences is None else body.stop_sequences,
        structure=structure_of(body, notes),
    )


def structure_of(body: ConversationBody, notes: Notes) -> Structure | None:
    """Return the form that the answer has to have; None for any."""
    newer = body.output_config.format if body.output_config else None
    if newer is not None and body.output_format is not None:
        raise RequestError("output_format", "is given beside output_config.format; leave it out")
    if newer is not None:
        return _structure(newer, "output_config.format", notes)
    if body.output_format is not None:
        return _structure(body.output_format, "output_format", notes)
    return None


def _structure(given: dict[str, Any], path: str, notes: Notes) -> Structure:
    kind = named_type(given, path)
    if kind != SCHEMA:
        raise UnsupportedError(f"{path}.type", f'is {kind!r:.80}; only "{SCHEMA}" is supported')
    for name in given:
        if name not in ("type", "schema"):
            notes.take_unlisted(f"{path}.{name}", f"{path}.{name}", path)
    if "schema" not in given:
        raise RequestError(f"{path}.schema", "is missing; give a JSON schema, an object")
    return Structure.of(SCHEMA, given["schema"], f"{path}.schema")
