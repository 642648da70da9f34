"""Requests of both clients, one function per method.

Each makes the message, which is checked before anything is sent, and says how its answer is parsed.
The clients differ only in how they wait.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from google.protobuf.message import Message

from jaxserve.client.descriptions import Loads, ModelInfo, ServerInfo
from jaxserve.client.messages import (
    ChatOptions,
    Messages,
    Options,
    Prompt,
    chat_messages,
    conversation_message,
    embed_input,
    generation_message,
    new_message,
    prompt_fields,
    token_ids_of,
)
from jaxserve.client.responses import (
    embedded_of,
    event_of,
    ignored_in,
    plain,
    result_of,
    score_of,
)
from jaxserve.client.results import Embedded, Event, Result, Score, Tokenized
from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.v1 import admin_pb2, inference_pb2


@dataclass(frozen=True)
class RpcRequest[T]:
    """A call that can be made: its method, its message and the parser of its answer."""

    method: str  # service and name, such as "inference.Generate"
    message: Message
    # Makes the result from the answer, or an event from each message of a stream.
    parse: Callable[[Any], T]
    # The call may be made again where it is not known what became of the first attempt.
    repeatable: bool = True

    def result(self, message: Any, metadata: Iterable[tuple[str, Any]] | None) -> T:
        """Return the result of an answer.

        Args:
            metadata: Trailing metadata of the call.
        """
        found = self.parse(message)
        if isinstance(found, Result) and (names := ignored_in(metadata)):
            return cast(T, replace(found, ignored=names))
        return found


def generate(prompt: Prompt, params: SamplingParams | None, options: Options) -> RpcRequest[Result]:
    message = generation_message(
        inference_pb2.GenerateRequest, prompt_fields(prompt), params, options
    )
    return RpcRequest("inference.Generate", message, result_of)


def stream(prompt: Prompt, params: SamplingParams | None, options: Options) -> RpcRequest[Event]:
    message = generation_message(
        inference_pb2.GenerateStreamRequest, prompt_fields(prompt), params, options
    )
    return RpcRequest("inference.GenerateStream", message, event_of)


def chat(
    messages: Messages, params: SamplingParams | None, options: ChatOptions
) -> RpcRequest[Result]:
    message = conversation_message(inference_pb2.ChatRequest, messages, params, options)
    return RpcRequest("inference.Chat", message, result_of)


def chat_stream(
    messages: Messages, params: SamplingParams | None, options: ChatOptions
) -> RpcRequest[Event]:
    message = conversation_message(inference_pb2.ChatStreamRequest, messages, params, options)
    return RpcRequest("inference.ChatStream", message, event_of)


def score(prompt: Prompt, top_logprobs: int, request_id: str, priority: int) -> RpcRequest[Score]:
    given = {"top_logprobs": top_logprobs, "request_id": request_id, "priority": priority}
    message = new_message(inference_pb2.ScoreRequest, prompt_fields(prompt) | given)
    return RpcRequest("inference.Score", message, score_of)


def embed(
    inputs: Sequence[Prompt], request_id: str, priority: int, cache_salt: str
) -> RpcRequest[Embedded]:
    if isinstance(inputs, str):
        raise RequestError("inputs", f"is {inputs!r:.80}; give a list of texts")
    entries = [embed_input(text, f"inputs[{i}]") for i, text in enumerate(inputs)]
    given = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}
    message = new_message(inference_pb2.EmbedRequest, {"inputs": entries} | given)
    return RpcRequest("inference.Embed", message, embedded_of)


def tokenize(text: str | Messages) -> RpcRequest[Tokenized]:
    if isinstance(text, str):
        given: dict[str, Any] = {"text": text}
    else:
        given = {"conversation": inference_pb2.Conversation(messages=chat_messages(text))}
    message = new_message(inference_pb2.TokenizeRequest, given)
    return RpcRequest("inference.Tokenize", message, partial(plain, Tokenized))


def detokenize(token_ids: Sequence[int]) -> RpcRequest[str]:
    message = inference_pb2.DetokenizeRequest(token_ids=token_ids_of("token_ids", token_ids))
    return RpcRequest("inference.Detokenize", message, lambda answer: answer.text)


def abort(request_ids: Sequence[str]) -> RpcRequest[tuple[str, ...]]:
    if isinstance(request_ids, str):
        raise RequestError("request_ids", f"is {request_ids!r:.80}; give a list of ids")
    message = new_message(admin_pb2.AbortRequest, {"request_ids": list(request_ids)})
    return RpcRequest("admin.Abort", message, lambda answer: tuple(answer.aborted_request_ids))


def model_info() -> RpcRequest[ModelInfo]:
    message = admin_pb2.GetModelInfoRequest()
    return RpcRequest("admin.GetModelInfo", message, partial(plain, ModelInfo))


def server_info() -> RpcRequest[ServerInfo]:
    message = admin_pb2.GetServerInfoRequest()
    return RpcRequest("admin.GetServerInfo", message, partial(plain, ServerInfo))


def loads() -> RpcRequest[Loads]:
    return RpcRequest("admin.GetLoads", admin_pb2.GetLoadsRequest(), partial(plain, Loads))


def flush_cache() -> RpcRequest[None]:
    return RpcRequest("admin.FlushCache", admin_pb2.FlushCacheRequest(), lambda answer: None)


def drain() -> RpcRequest[int]:
    # A second attempt might reach the server that has taken the place of the first one.
    return RpcRequest(
        "admin.Drain", admin_pb2.DrainRequest(), lambda answer: answer.requests, repeatable=False
    )
