"""Translate requests for responses into the terms of the service."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxserve.chat import TemplateOptions, Tools
from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.server.core.limits import Limits
from jaxserve.server.http.agents.listed import Notes, parsed
from jaxserve.server.http.agents.responses.conversation import Conversation, ItemReader, items_of
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
from jaxserve.server.http.types import SAME
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

    `items` are the input's, with those of earlier responses before them.
    """

    items: Sequence[Any]
    conversation: Conversation
    tools: RequestTools
    offered: Tools | None
    options: TemplateOptions
    structure: Structure | None


def question_of(
    body: InputBody, earlier: Sequence[Any], limits: Limits, notes: Notes, seals: Seals
) -> Question:
    """Return the input of a checked body; RequestError has the path of what is wrong.

    Args:
        earlier: Items of the response before this one, and of those before it.
    """
    given = [] if body.input is None else items_of(body.input, "input")
    placed = [(EARLIER, item) for item in earlier]
    placed += [(f"input[{i}]", item) for i, item in enumerate(given)]
    conversation = ItemReader(notes, seals).read(body.instructions, placed)
    if not conversation.messages:
        raise RequestError("input", "is missing or empty; give a text, or at least one item")
    tools = read_tools(body.tools or (), limits, notes)
    text = parsed(TextOptions, body.text or {}, notes, "text")
    return Question(
        items=[*earlier, *given],
        conversation=conversation,
        tools=tools,
        offered=choose(tools, body.tool_choice, body.parallel_tool_calls, notes),
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
            notes.take_unlisted(f"include.{name}", f"include[{i}]", "what a response can include")
    return ENCRYPTED in body.include


def sampling_of(
    body: ResponsesBody, structure: Structure | None, defaults: SamplingFields
) -> SamplingParams:
    """Return the sampling parameters of the body, and `defaults` for those that it leaves open."""
    given = {name: getattr(body, name) for name in SAME}
    given["max_tokens"] = body.max_output_tokens
    given["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM turns top_k off by -1
    given["structure"] = structure
    chosen = {name: value for name, value in given.items() if value is not None}
    with names_of_body(NAMES, ()):
        return SamplingParams(**{**defaults, **chosen})


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
    format = parsed(TextFormat, {n: v for n, v in given.items() if n != "schema"}, notes, FORMAT)
    match format.type:
        case "text":
            return None
        case "json_object":
            return Structure.of(format.type, True, FORMAT)
        case "json_schema":
            schema = given.get("schema")
            path = f"{FORMAT}.schema"
            if not isinstance(schema, Mapping):
                raise RequestError(path, f"is {schema!r:.80}; it must be a JSON schema object")
            return Structure.of(format.type, schema, path)
        case _:
            accepted = "text, json_object and json_schema"
            problem = f"is {format.type!r:.80}; only {accepted} are supported"
            raise UnsupportedError(f"{FORMAT}.type", problem)
