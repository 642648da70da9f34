"""Translate requests for responses into the terms of the service."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxserve.chat import TemplateOptions, Tools
from jaxserve.errors import RequestError
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.conversation import Conversation
from jaxserve.server.http.agents.listed import Notes, parsed
from jaxserve.server.http.agents.responses.conversation import ItemReader, items_of
from jaxserve.server.http.agents.responses.store import Stored
from jaxserve.server.http.agents.responses.tools import RequestTools, choose, read_tools
from jaxserve.server.http.agents.responses.types import (
    ENCRYPTED,
    INCLUDED_ELSEWHERE,
    LOGPROBS,
    InputBody,
    ReasoningOptions,
    ResponsesBody,
    TextFormat,
    TextOptions,
)
from jaxserve.server.http.agents.turns import MESSAGES, names_of_body
from jaxserve.server.http.errors import UnsupportedError
from jaxserve.server.http.json import dumps
from jaxserve.server.security.seals import Seals
from jaxserve.structure import Structure

EARLIER = "previous_response_id"
FORMAT = "text.format"
# Paths in the body of what has another name in the service.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        MESSAGES: "input",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
    }
)


@dataclass(frozen=True)
class Question:
    """Input of a request: the conversation, and how its answer shall be.

    `items` are the JSON texts of the input's items, with those of earlier responses before them.
    """

    items: Sequence[bytes]
    conversation: Conversation
    request_tools: RequestTools
    tools: Tools | None
    options: TemplateOptions
    structure: Structure | None


def question_of(
    body: InputBody, earlier: Stored | None, limits: Limits, notes: Notes, seals: Seals
) -> Question:
    """Return the input of a checked body; RequestError has the path of what is wrong.

    Args:
        earlier: Response before this one.
    """
    given = [] if body.input is None else items_of(body.input, "input")
    reader = ItemReader(notes, seals)
    if body.instructions is not None:
        reader.found.add({"role": "system", "content": body.instructions}, "instructions")
    if earlier:
        reader.read(earlier.conversation(), lambda i: EARLIER)
    before = len(reader.items)
    reader.read(given, lambda i: f"input[{i}]")
    if not reader.found.messages:
        raise RequestError("input", "is missing or empty; give a text, or at least one item")
    request_tools = read_tools(body.tools or (), limits, notes)
    text = parsed(TextOptions, body.text or {}, notes, "text")
    return Question(
        items=(*(earlier.items if earlier else ()), *map(dumps, reader.items[before:])),
        conversation=reader.found,
        request_tools=request_tools,
        tools=choose(request_tools, body.tool_choice, body.parallel_tool_calls, notes),
        options=_options(body, text, notes),
        structure=_structure(text.format, notes),
    )


def encrypts(body: ResponsesBody, notes: Notes) -> bool:
    """Return whether the client wants its thoughts encrypted; refuse what cannot be included."""
    for i, name in enumerate(body.include):
        if name == LOGPROBS:
            problem = f"is {name!r}, which is not supported; /v1/chat/completions has them"
            raise UnsupportedError(f"include[{i}]", problem)
        if name in INCLUDED_ELSEWHERE:
            notes.add(f"include.{name}")
        elif name != ENCRYPTED:
            notes.take_unknown(f"include.{name}", f"include[{i}]", name)
    return ENCRYPTED in body.include


def _options(body: InputBody, text: TextOptions, notes: Notes) -> TemplateOptions:
    reasoning = parsed(ReasoningOptions, body.reasoning or {}, notes, "reasoning")
    with names_of_body(NAMES, ()):
        return TemplateOptions(
            reasoning_effort=reasoning.effort,
            verbosity=text.verbosity,
            thinking_budget=body.thinking_budget if isinstance(body, ResponsesBody) else None,
            chat_template_kwargs=body.chat_template_kwargs or {},
        )


def _structure(given: Mapping[str, Any] | None, notes: Notes) -> Structure | None:
    """Return the structure that the answer must follow; None for plain text."""
    if given is None:
        return None
    # A schema is a document of its own, with fields of its own.
    others = {name: value for name, value in given.items() if name != "schema"}
    kind = parsed(TextFormat, others, notes, FORMAT).type
    match kind:
        case "text":
            return None
        case "json_object":
            return Structure.of(kind, True, FORMAT)
        case "json_schema":
            schema = given.get("schema")
            path = f"{FORMAT}.schema"
            if not isinstance(schema, Mapping):
                raise RequestError(path, f"is {schema!r:.80}; it must be a JSON schema object")
            return Structure.of(kind, schema, path)
        case _:
            accepted = "text, json_object and json_schema"
            problem = f"is {kind!r:.80}; only {accepted} are supported"
            raise UnsupportedError(f"{FORMAT}.type", problem)
