"""Requests of both clients, one function per method.

Each makes the message, which is checked before anything is sent, and says how its answer is parsed.
The clients differ only in how they wait.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, TypedDict, cast

from google.protobuf.message import Message

from jaxserve.client.responses import embedded_of, event_of, plain, result_of, score_of
from jaxserve.client.results import (
    Embedded,
    Event,
    Loads,
    ModelInfo,
    Result,
    Score,
    ServerInfo,
    Tokenized,
    ToolCall,
)
from jaxserve.errors import RequestError
from jaxserve.request import SamplingParams, check_token_ids, integers
from jaxserve.structure import Structure
from jaxserve.v1 import admin_pb2, common_pb2, inference_pb2

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
HEADER = ("request_id", "priority", "cache_salt")
IDS = 2**32  # a message carries token ids below this
DEFAULTS = SamplingParams()


class Options(TypedDict, total=False):
    """Keywords of a request that generates.

    timeout: seconds that it may take. request_id, priority and cache_salt: sent with it. The others
    are fields of SamplingParams, and override those of `params`.
    """

    timeout: float | None
    request_id: str
    priority: int
    cache_salt: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    min_tokens: int
    max_tokens: int | None
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    structure: Structure | None


class ChatOptions(Options, total=False):
    """Keywords of a conversation: those of Options, and the tools.

    tools: functions that the answer may call: each with a name and, optionally, a description and
    parameters, a JSON schema as plain values. tool_choice: "auto", "none" or "required". tool_name:
    the tool that has to be called. parallel_tool_calls: False keeps only the first call.
    """

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    tool_name: str
    parallel_tool_calls: bool


@dataclass(frozen=True)
class RpcRequest[T]:
    """A call that can be made: its method, its message and the parser of its answer.

    method: service and name, such as "inference.Generate". parse: makes the result from the answer,
    or an event from each message of a stream. repeatable: the call may be made again where it is
    not known what became of the first attempt.
    """

    method: str
    message: Message
    parse: Callable[[Any], T]
    repeatable: bool = True


def generate(prompt: Prompt, params: SamplingParams | None, options: Options) -> RpcRequest[Result]:
    message = _request(inference_pb2.GenerateRequest, _prompt(prompt), params, options)
    return RpcRequest("inference.Generate", message, result_of)


def stream(prompt: Prompt, params: SamplingParams | None, options: Options) -> RpcRequest[Event]:
    message = _request(inference_pb2.GenerateStreamRequest, _prompt(prompt), params, options)
    return RpcRequest("inference.GenerateStream", message, event_of)


def chat(
    messages: Messages, params: SamplingParams | None, options: ChatOptions
) -> RpcRequest[Result]:
    message = _request(
        inference_pb2.ChatRequest, _conversation(messages, options), params, _without_tools(options)
    )
    return RpcRequest("inference.Chat", message, result_of)


def chat_stream(
    messages: Messages, params: SamplingParams | None, options: ChatOptions
) -> RpcRequest[Event]:
    message = _request(
        inference_pb2.ChatStreamRequest,
        _conversation(messages, options),
        params,
        _without_tools(options),
    )
    return RpcRequest("inference.ChatStream", message, event_of)


def score(prompt: Prompt, top_logprobs: int, request_id: str, priority: int) -> RpcRequest[Score]:
    given = {"top_logprobs": top_logprobs, "request_id": request_id, "priority": priority}
    return RpcRequest(
        "inference.Score", _built(inference_pb2.ScoreRequest, _prompt(prompt) | given), score_of
    )


def embed(
    inputs: Sequence[Prompt], request_id: str, priority: int, cache_salt: str
) -> RpcRequest[Embedded]:
    if isinstance(inputs, str):
        raise RequestError("inputs", f"is {inputs!r:.80}; give a list of texts")
    entries = [_embed_input(text, f"inputs[{i}]") for i, text in enumerate(inputs)]
    given = {
        "inputs": entries,
        "request_id": request_id,
        "priority": priority,
        "cache_salt": cache_salt,
    }
    return RpcRequest("inference.Embed", _built(inference_pb2.EmbedRequest, given), embedded_of)


def tokenize(text: str | Messages) -> RpcRequest[Tokenized]:
    if isinstance(text, str):
        given: dict[str, Any] = {"text": text}
    else:
        given = {"conversation": inference_pb2.Conversation(messages=_messages(text))}
    return RpcRequest(
        "inference.Tokenize",
        _built(inference_pb2.TokenizeRequest, given),
        partial(plain, Tokenized),
    )


def detokenize(token_ids: Sequence[int]) -> RpcRequest[str]:
    message = inference_pb2.DetokenizeRequest(token_ids=_ids("token_ids", token_ids))
    return RpcRequest("inference.Detokenize", message, lambda answer: answer.text)


def abort(request_ids: Sequence[str]) -> RpcRequest[tuple[str, ...]]:
    if isinstance(request_ids, str):
        raise RequestError("request_ids", f"is {request_ids!r:.80}; give a list of ids")
    message = _built(admin_pb2.AbortRequest, {"request_ids": list(request_ids)})
    return RpcRequest("admin.Abort", message, lambda answer: tuple(answer.aborted_request_ids))


def model_info() -> RpcRequest[ModelInfo]:
    return RpcRequest(
        "admin.GetModelInfo", admin_pb2.GetModelInfoRequest(), partial(plain, ModelInfo)
    )


def server_info() -> RpcRequest[ServerInfo]:
    return RpcRequest(
        "admin.GetServerInfo", admin_pb2.GetServerInfoRequest(), partial(plain, ServerInfo)
    )


def loads() -> RpcRequest[Loads]:
    return RpcRequest("admin.GetLoads", admin_pb2.GetLoadsRequest(), partial(plain, Loads))


def flush_cache() -> RpcRequest[None]:
    return RpcRequest("admin.FlushCache", admin_pb2.FlushCacheRequest(), lambda answer: None)


def drain() -> RpcRequest[int]:
    # A second attempt might reach the server that has taken the place of the first one.
    return RpcRequest(
        "admin.Drain", admin_pb2.DrainRequest(), lambda answer: answer.requests, repeatable=False
    )


# ---- messages


def _request[M: Message](
    kind: type[M], prompt: dict[str, Any], params: SamplingParams | None, options: Options
) -> M:
    """Return the message of one of the four methods that generate."""
    header = {name: value for name, value in options.items() if name in HEADER}
    given: dict[str, Any] = {
        name: value for name, value in options.items() if name not in (*HEADER, "timeout")
    }
    sampling = _sampling(replace(params or DEFAULTS, **given))
    return _built(kind, {**prompt, "sampling": sampling, **header})


def _sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    """Return the message with what differs from the defaults, which are the server's as well."""
    params.check_vocabulary(IDS)
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    chosen = {name: value for name, value in values.items() if value != getattr(DEFAULTS, name)}
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


def _prompt(prompt: Prompt, name: str = "prompt") -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    return {"token_ids": common_pb2.TokenIds(ids=_ids(name, prompt))}


def _embed_input(prompt: Prompt, path: str) -> inference_pb2.EmbedInput:
    return _built(inference_pb2.EmbedInput, _prompt(prompt, path), f"{path}.")


def _ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    ids = integers(name, values)
    check_token_ids(name, ids, IDS)
    return ids


def _conversation(messages: Messages, options: ChatOptions) -> dict[str, Any]:
    """Return the fields of a ChatRequest that a GenerateRequest lacks."""
    given: dict[str, Any] = {name: value for name, value in options.items() if name in TOOLS}
    if "tools" in given:
        given["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given["tools"])]
    if "tool_choice" in given:
        if given["tool_choice"] not in TOOL_CHOICES:
            raise RequestError(
                "tool_choice",
                f"is {given['tool_choice']!r:.80}; give one of {', '.join(TOOL_CHOICES)}",
            )
        given["tool_choice"] = TOOL_CHOICES[given["tool_choice"]]
    return {"messages": _messages(messages), **given}


def _without_tools(options: ChatOptions) -> Options:
    return cast(Options, {name: value for name, value in options.items() if name not in TOOLS})


def _tool(tool: Mapping[str, Any], path: str) -> inference_pb2.Tool:
    if not isinstance(tool, Mapping) or not {"name"} <= set(tool) <= TOOL:
        raise RequestError(
            path, f"is {tool!r:.80}; give an object with name, description, parameters, strict"
        )
    given = dict(tool)
    if "parameters" in given:
        given["parameters"] = _json(given["parameters"], f"{path}.parameters")
    return _built(inference_pb2.Tool, given, f"{path}.")


def _json(value: object, path: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(path, f"cannot be written as JSON ({error})") from None


def _messages(messages: Messages) -> list[inference_pb2.ChatMessage]:
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
    return _built(inference_pb2.ChatMessage, given, f"{path}.")


def _needed(message: Mapping[str, Any]) -> set[str]:
    """Return the keys that a message must have; one that calls tools may have no content."""
    return {"role"} if message.get("tool_calls") else {"role", "content"}


def _call(call: object, path: str) -> inference_pb2.ToolCall:
    if not isinstance(call, ToolCall):
        raise RequestError(path, f"is {call!r:.80}; give the ToolCall of an answer")
    return _built(inference_pb2.ToolCall, asdict(call), f"{path}.")


def _built[M: Message](kind: type[M], given: dict[str, Any], path: str = "") -> M:
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
