"""What can be asked: for each method the call's name, its message, made and checked before anything
is sent, and how its answer is read. Both clients say these things; they differ only in how they
wait.
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
Messages = Sequence[
    Mapping[str, Any]
]  # each with role and content, or tool_calls; tool_call_id, reasoning_content
MESSAGE = frozenset({"role", "content", "tool_calls", "tool_call_id", "reasoning_content"})
TOOL = frozenset({"name", "description", "parameters", "strict"})
TOOL_CHOICES = {
    "auto": inference_pb2.TOOL_CHOICE_AUTO,
    "none": inference_pb2.TOOL_CHOICE_NONE,
    "required": inference_pb2.TOOL_CHOICE_REQUIRED,
}
TOOLS = ("tools", "tool_choice", "tool_name", "parallel_tool_calls")
HEADER = ("request_id", "priority", "cache_salt")
IDS = 2**32  # token ids of a message are below this
DEFAULTS = SamplingParams()


class Options(TypedDict, total=False):
    """Of a request: seconds it may take, its id, priority and cache salt; single fields of
    SamplingParams, which come before those of `params`.
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
    """tools: functions that the answer may call: each with name, description and parameters, a JSON
    schema as plain values; the last two may be left out. tool_choice: "auto", "none" or "required".
    tool_name: the one that has to be called. parallel_tool_calls: any number of calls; otherwise
    the first one is kept.
    """

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    tool_name: str
    parallel_tool_calls: bool


@dataclass(frozen=True)
class Ask[T]:
    """method: service and name. read: makes the result of an answer; of a stream, the event of each
    message.

    repeatable: whether it may be asked again when nobody knows what became of it.
    """

    method: str
    message: Message
    read: Callable[[Any], T]
    repeatable: bool = True


def generate(prompt: Prompt, params: SamplingParams | None, options: Options) -> Ask[Result]:
    message = _request(inference_pb2.GenerateRequest, _prompt(prompt), params, options)
    return Ask("inference.Generate", message, result_of)


def stream(prompt: Prompt, params: SamplingParams | None, options: Options) -> Ask[Event]:
    message = _request(inference_pb2.GenerateStreamRequest, _prompt(prompt), params, options)
    return Ask("inference.GenerateStream", message, event_of)


def chat(messages: Messages, params: SamplingParams | None, options: ChatOptions) -> Ask[Result]:
    message = _request(
        inference_pb2.ChatRequest, _conversation(messages, options), params, _others(options)
    )
    return Ask("inference.Chat", message, result_of)


def chat_stream(
    messages: Messages, params: SamplingParams | None, options: ChatOptions
) -> Ask[Event]:
    message = _request(
        inference_pb2.ChatStreamRequest, _conversation(messages, options), params, _others(options)
    )
    return Ask("inference.ChatStream", message, event_of)


def score(prompt: Prompt, top_logprobs: int, request_id: str, priority: int) -> Ask[Score]:
    given = {"top_logprobs": top_logprobs, "request_id": request_id, "priority": priority}
    return Ask(
        "inference.Score", _built(inference_pb2.ScoreRequest, _prompt(prompt) | given), score_of
    )


def embed(
    inputs: Sequence[Prompt], request_id: str, priority: int, cache_salt: str
) -> Ask[Embedded]:
    if isinstance(inputs, str):
        raise RequestError("inputs", f"is {inputs!r:.80}; give a list of texts")
    entries = [_embed_input(text, f"inputs[{i}]") for i, text in enumerate(inputs)]
    given = {
        "inputs": entries,
        "request_id": request_id,
        "priority": priority,
        "cache_salt": cache_salt,
    }
    return Ask("inference.Embed", _built(inference_pb2.EmbedRequest, given), embedded_of)


def tokenize(text: str | Messages) -> Ask[Tokenized]:
    if isinstance(text, str):
        given: dict[str, Any] = {"text": text}
    else:
        given = {"conversation": inference_pb2.Conversation(messages=_messages(text))}
    return Ask(
        "inference.Tokenize",
        _built(inference_pb2.TokenizeRequest, given),
        partial(plain, Tokenized),
    )


def detokenize(token_ids: Sequence[int]) -> Ask[str]:
    message = inference_pb2.DetokenizeRequest(token_ids=_ids("token_ids", token_ids))
    return Ask("inference.Detokenize", message, lambda answer: answer.text)


def abort(request_ids: Sequence[str]) -> Ask[tuple[str, ...]]:
    if isinstance(request_ids, str):
        raise RequestError("request_ids", f"is {request_ids!r:.80}; give a list of ids")
    message = _built(admin_pb2.AbortRequest, {"request_ids": list(request_ids)})
    return Ask("admin.Abort", message, lambda answer: tuple(answer.aborted_request_ids))


def model_info() -> Ask[ModelInfo]:
    return Ask("admin.GetModelInfo", admin_pb2.GetModelInfoRequest(), partial(plain, ModelInfo))


def server_info() -> Ask[ServerInfo]:
    return Ask("admin.GetServerInfo", admin_pb2.GetServerInfoRequest(), partial(plain, ServerInfo))


def loads() -> Ask[Loads]:
    return Ask("admin.GetLoads", admin_pb2.GetLoadsRequest(), partial(plain, Loads))


def flush_cache() -> Ask[None]:
    return Ask("admin.FlushCache", admin_pb2.FlushCacheRequest(), lambda answer: None)


def drain() -> Ask[int]:
    """The second time might reach the server that has taken the first one's place."""
    return Ask(
        "admin.Drain", admin_pb2.DrainRequest(), lambda answer: answer.requests, repeatable=False
    )


# ---- messages


def _request[M: Message](
    kind: type[M], prompt: dict[str, Any], params: SamplingParams | None, options: Options
) -> M:
    """Of one of the four requests that generate."""
    header = {name: value for name, value in options.items() if name in HEADER}
    given: dict[str, Any] = {
        name: value for name, value in options.items() if name not in (*HEADER, "timeout")
    }
    sampling = _sampling(replace(params or DEFAULTS, **given))
    return _built(kind, {**prompt, "sampling": sampling, **header})


def _sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    """What differs from the default; the server's are the same."""
    params.check_vocabulary(IDS)
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    chosen = {name: value for name, value in values.items() if value != getattr(DEFAULTS, name)}
    if "allowed_token_ids" in chosen:
        chosen["allowed_token_ids"] = common_pb2.TokenIds(ids=chosen["allowed_token_ids"])
    if structure := chosen.pop("structure", None):
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
    """The fields of a ChatRequest that a GenerateRequest has not."""
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


def _others(options: ChatOptions) -> Options:
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
    needed = (
        {"role"}
        if isinstance(message, Mapping) and message.get("tool_calls")
        else {"role", "content"}
    )
    if not isinstance(message, Mapping) or not needed <= set(message) <= MESSAGE:
        raise RequestError(
            path, f"is {message!r:.80}; give an object with role and content, and nothing else"
        )
    given = dict(message)
    if "tool_calls" in given:
        calls = [
            _call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(given["tool_calls"])
        ]
        given["tool_calls"] = calls
    return _built(inference_pb2.ChatMessage, given, f"{path}.")


def _call(call: object, path: str) -> inference_pb2.ToolCall:
    if not isinstance(call, ToolCall):
        raise RequestError(path, f"is {call!r:.80}; give the ToolCall of an answer")
    return _built(inference_pb2.ToolCall, asdict(call), f"{path}.")


def _built[M: Message](kind: type[M], given: dict[str, Any], path: str = "") -> M:
    """A message field by field, so that a value which cannot be sent is an error with the field's
    name.
    """
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
