"""Results, made from messages of jaxserve.v1."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from jaxserve.client.errors import CallError
from jaxserve.client.results import (
    Choice,
    ChoiceFinish,
    Delta,
    Embedded,
    Event,
    Finish,
    Logprob,
    PromptInfo,
    PromptLogprobs,
    Result,
    Score,
    Timings,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from jaxserve.v1 import common_pb2, inference_pb2

IGNORED = "jaxserve-ignored"  # trailing metadata that names what changed nothing
REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORTED: "abort",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def plain[T](kind: type[T], message: Any) -> T:
    """Return a dataclass whose fields have the same names as those of the message.

    The fields hold numbers and strings, and lists and maps of them.
    """
    values = {field.name: _value(getattr(message, field.name)) for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**values)


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return value


def ignored_in(metadata: Iterable[tuple[str, Any]] | None) -> tuple[str, ...]:
    """Return the names of what changed nothing, from the trailing metadata of a call."""
    listed = [str(value) for key, value in metadata or () if key == IGNORED]
    return tuple(name for value in listed for name in value.split(", "))


def result_of(message: inference_pb2.GenerateResponse | inference_pb2.ChatResponse) -> Result:
    return Result(
        request_id=message.request_id,
        choices=tuple(_choice(choice) for choice in message.choices),
        usage=plain(Usage, message.usage),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
    )


def event_of(
    message: inference_pb2.GenerateStreamResponse | inference_pb2.ChatStreamResponse,
) -> Event:
    match message.WhichOneof("event"):
        case "delta":
            return _delta(message.delta)
        case "prompt_info":
            return plain(PromptInfo, message.prompt_info)
        case "finish_info":
            return _finish(message.finish_info)
        case "prompt_logprobs":
            scores = message.prompt_logprobs
            return PromptLogprobs(start=scores.start, entries=_logprobs(scores.entries))
    problem = "the stream has an event that is not known here (a newer server: update jaxserve)"
    raise CallError("UNIMPLEMENTED", problem)


def score_of(message: inference_pb2.ScoreResponse) -> Score:
    return Score(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        total_logprob=message.total_logprob,
    )


def embedded_of(message: inference_pb2.EmbedResponse) -> Embedded:
    return Embedded(
        request_id=message.request_id,
        embeddings=tuple(tuple(embedding.values) for embedding in message.embeddings),
        usage=plain(Usage, message.usage),
    )


def _delta(message: inference_pb2.Delta) -> Delta:
    return Delta(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        reasoning_content=message.reasoning_content,
        tool_calls=tuple(plain(ToolCallDelta, call) for call in message.tool_calls),
    )


def _finish(message: inference_pb2.FinishInfo) -> Finish:
    endings = tuple(ChoiceFinish(**_ending(choice)) for choice in message.choices)
    return Finish(choices=endings, usage=plain(Usage, message.usage))


def _choice(message: inference_pb2.Choice) -> Choice:
    return Choice(
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        reasoning_content=message.reasoning_content,
        tool_calls=tuple(plain(ToolCall, call) for call in message.tool_calls),
        **_ending(message.finish),
    )


def _ending(message: common_pb2.ChoiceFinish) -> dict[str, Any]:
    """Return the fields of a ChoiceFinish, by name."""
    stopped_by = message.WhichOneof("stopped_by")
    return {
        "index": message.index,
        "finish_reason": REASONS.get(message.reason, f"unknown ({message.reason})"),
        "stopped_by": getattr(message, stopped_by) if stopped_by else None,
        "seed": message.seed,
        "timings": plain(Timings, message.timings),
    }


def _logprobs(entries: Iterable[common_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(_token_logprob(entry) for entry in entries)


def _token_logprob(entry: common_pb2.TokenLogprob) -> TokenLogprob:
    chosen = entry.chosen
    top = tuple(plain(Logprob, other) for other in entry.top)
    return TokenLogprob(
        token_id=chosen.token_id, token=chosen.token, logprob=chosen.logprob, top=top
    )
