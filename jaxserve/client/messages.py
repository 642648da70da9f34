"""Messages of jaxserve.v1, made from what callers of the clients give."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, cast

from google.protobuf.message import Message

from jaxserve.client.results import ToolCall
from jaxserve.errors import RequestError
from jaxserve.request_values import check_token_ids, integers
from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.structure import Structure
from jaxserve.v1 import common_pb2, inference_pb2

Prompt = str | Sequence[int]  # text, or token ids
# Each has role, and content or tool_calls; tool_call_id and reasoning_content are optional.
Messages = Sequence[Mapping[str, Any]]
MESSAGE = frozenset({"role", "content", "tool_calls", "tool_call_id", "reasoning_content"})
TOOL = frozenset({"name", "description", "parameters", "strict"})
TOOL_CHOICES = {
    "auto": inference_pb2.TOOL_CHOICE_AUTO,
    "none": inference_pb2.TOOL_CHOICE_NONE,
    "required": inference_pb2.TOOL_CHOICE_REQUIRED,
}
TOOLS = ("tools", "tool_choice", "tool_name", "parallel_tool_calls")
# Options of an answer that work by the chat template; the server checks their values.
VARIABLES = "chat_template_kwargs"
TEMPLATE = ("reasoning_effort", "enable_thinking", "thinking_budget", "verbosity", VARIABLES)
HEADER = ("request_id", "priority", "cache_salt")
IDS = 2**32  # a message carries token ids below this
DEFAULTS = SamplingParams()
# Parameters for which a model may have defaults of its own; SamplingParams says all of them.
OF_THE_MODEL = frozenset({"temperature", "top_k", "top_p", "min_p", "repetition_penalty"})


class Options(SamplingFields, total=False):
    """Keywords of a request that generates.

    The inherited ones are fields of SamplingParams, and override those of `params`.
    """

    timeout: float | None  # seconds that the request may take
    # These are sent with the request.
    request_id: str
    priority: int
    cache_salt: str


class ChatOptions(Options, total=False):
    """Keywords of a conversation: those of Options, the tools, and options of the chat template.

    One that the chat template does not read has no effect, and is named in `ignored` of the result.
    """

    # Functions that the answer may call: each with a name and, optionally, a description and
    # parameters, a JSON schema as plain values.
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str  # "auto", "none" or "required"
    tool_name: str  # the tool that has to be called
    parallel_tool_calls: bool  # False keeps only the first call
    # How to think before the answer: "none" is not at all, then "minimal", "low", "medium", "high",
    # "xhigh" and "max"; None of these and of the next three leaves it to the template.
    reasoning_effort: str | None
    enable_thinking: bool | None  # whether to think; overrides what reasoning_effort says of that
    thinking_budget: int | None  # tokens of the thought behind which it is closed, at least 1
    verbosity: str | None  # length of the answer: "low", "medium" or "high"
    chat_template_kwargs: Mapping[str, Any] | None  # further variables of the template, by name


def generation_message[M: Message](
    kind: type[M], prompt: dict[str, Any], params: SamplingParams | None, options: Options
) -> M:
    """Return the message of one of the four methods that generate."""
    header = {name: value for name, value in options.items() if name in HEADER}
    given: dict[str, Any] = {
        name: value for name, value in options.items() if name not in (*HEADER, "timeout")
    }
    said = frozenset(given) | (OF_THE_MODEL if params else frozenset())
    sampling = _sampling(replace(params or DEFAULTS, **given), said)
    return new_message(kind, {**prompt, "sampling": sampling, **header})


def _sampling(params: SamplingParams, said: frozenset[str]) -> common_pb2.SamplingParams:
    """Return the message with what the caller has `said`, and what differs from our defaults.

    The server takes its model's defaults for what is left out.
    """
    params.check_vocabulary(IDS)
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    chosen = {
        name: value
        for name, value in values.items()
        if value is not None and (name in said or value != getattr(DEFAULTS, name))
    }
    if "allowed_token_ids" in chosen:
        chosen["allowed_token_ids"] = common_pb2.TokenIds(ids=chosen["allowed_token_ids"])
    structure = chosen.pop("structure", None)
    if structure:
        chosen[structure.kind] = _structure(structure)
    return common_pb2.SamplingParams(**chosen)


def _structure(structure: Structure) -> Any:
    match structure.kind:
        case "json_object":
            return True
        case "choice":
            return common_pb2.TextChoice(texts=json.loads(structure.text))
    return structure.text


def prompt_fields(prompt: Prompt, name: str = "prompt") -> dict[str, Any]:
    """Return the field that carries a prompt, text or token_ids."""
    if isinstance(prompt, str):
        return {"text": prompt}
    return {"token_ids": common_pb2.TokenIds(ids=token_ids_of(name, prompt))}


def embed_input(prompt: Prompt, path: str) -> inference_pb2.EmbedInput:
    """Return one input of an EmbedRequest, which errors name by its path."""
    return new_message(inference_pb2.EmbedInput, prompt_fields(prompt, path), f"{path}.")


def token_ids_of(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return token ids that a message can carry; RequestError for others."""
    ids = integers(name, values)
    check_token_ids(name, ids, IDS)
    return ids


def conversation_message[M: Message](
    kind: type[M], messages: Messages, params: SamplingParams | None, options: ChatOptions
) -> M:
    """Return the message of one of the two methods that answer a conversation."""
    others = {name: value for name, value in options.items() if name not in (*TOOLS, *TEMPLATE)}
    fields_of_chat = _conversation_fields(messages, options)
    return generation_message(kind, fields_of_chat, params, cast(Options, others))


def _conversation_fields(messages: Messages, options: ChatOptions) -> dict[str, Any]:
    """Return the fields of a ChatRequest that a GenerateRequest lacks."""
    given: dict[str, Any] = {name: value for name, value in options.items() if name in TOOLS}
    if "tools" in given:
        given["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given["tools"])]
    if "tool_choice" in given:
        if given["tool_choice"] not in TOOL_CHOICES:
            problem = f"is {given['tool_choice']!r:.80}; give one of {', '.join(TOOL_CHOICES)}"
            raise RequestError("tool_choice", problem)
        given["tool_choice"] = TOOL_CHOICES[given["tool_choice"]]
    return {"messages": chat_messages(messages), **given, **_template_fields(options)}


def _template_fields(options: ChatOptions) -> dict[str, Any]:
    """Return the fields of the options that work by the chat template and are given."""
    given: dict[str, Any] = {
        name: value for name, value in options.items() if name in TEMPLATE and value is not None
    }
    if VARIABLES in given:
        variables = given[VARIABLES]
        if not isinstance(variables, Mapping):
            raise RequestError(VARIABLES, f"is {variables!r:.80}; give a mapping of variables")
        given[VARIABLES] = _json(dict(variables), VARIABLES)
    return given


def _tool(tool: Mapping[str, Any], path: str) -> inference_pb2.Tool:
    if not isinstance(tool, Mapping) or not {"name"} <= set(tool) <= TOOL:
        raise RequestError(
            path, f"is {tool!r:.80}; give an object with name, description, parameters, strict"
        )
    given = dict(tool)
    if "parameters" in given:
        given["parameters"] = _json(given["parameters"], f"{path}.parameters")
    return new_message(inference_pb2.Tool, given, f"{path}.")


def _json(value: object, path: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(path, f"cannot be written as JSON ({error})") from None


def chat_messages(messages: Messages) -> list[inference_pb2.ChatMessage]:
    """Return the messages of a conversation; RequestError names the one that is wrong."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages", f"is {messages!r:.80}; give a list of messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], path: str) -> inference_pb2.ChatMessage:
    if not isinstance(message, Mapping) or not _needed(message) <= set(message) <= MESSAGE:
        raise RequestError(
            path, f"is {message!r:.80}; give an object with role and content, and nothing else"
        )
    given = dict(message)
    if "tool_calls" in given:
        given["tool_calls"] = [
            _call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(given["tool_calls"])
        ]
    return new_message(inference_pb2.ChatMessage, given, f"{path}.")


def _needed(message: Mapping[str, Any]) -> set[str]:
    """Return the keys that a message must have; one that calls tools may have no content."""
    return {"role"} if message.get("tool_calls") else {"role", "content"}


def _call(call: object, path: str) -> inference_pb2.ToolCall:
    if not isinstance(call, ToolCall):
        raise RequestError(path, f"is {call!r:.80}; give the ToolCall of an answer")
    return new_message(inference_pb2.ToolCall, asdict(call), f"{path}.")


def new_message[M: Message](kind: type[M], given: dict[str, Any], path: str = "") -> M:
    """Make a message field by field, so that an error names the field that cannot be sent."""
    message = kind()
    for name, value in given.items():
        try:
            if value is None:
                raise TypeError("there is no default for it")
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"{path}{name}", f"is {value!r:.80}, which cannot be sent ({error})"
            ) from None
    return message
