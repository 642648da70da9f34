"""The whole answer, put together from the events of its stream."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields

from jaxserve.client.results import (
    Choice,
    ChoiceFinish,
    Delta,
    Event,
    Finish,
    PromptInfo,
    PromptLogprobs,
    Result,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)


def join(events: Iterable[Event]) -> Result:
    """Return what generate or chat would have returned, from the events of a stream.

    Args:
        events: All events, from the first to the last.

    Raises:
        ValueError: The events do not begin with PromptInfo, or have no Finish.
    """
    info: PromptInfo | None = None
    finish: Finish | None = None
    deltas: dict[int, list[Delta]] = defaultdict(list)
    scores: list[TokenLogprob] = []
    for event in events:
        match event:
            case Delta():
                deltas[event.index].append(event)
            case PromptInfo():
                info = event
            case PromptLogprobs():
                scores += event.entries
            case Finish():
                finish = event
    if info is None or finish is None:
        raise ValueError("the stream was not read from its first event to its last")
    choices = tuple(_choice(ending, deltas[ending.index]) for ending in finish.choices)
    return Result(
        request_id=info.request_id,
        choices=choices,
        usage=finish.usage,
        prompt_logprobs=tuple(scores),
    )


def _choice(ending: ChoiceFinish, deltas: Sequence[Delta]) -> Choice:
    return Choice(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        reasoning_content="".join(delta.reasoning_content for delta in deltas),
        tool_calls=_calls(part for delta in deltas for part in delta.tool_calls),
        **{field.name: getattr(ending, field.name) for field in fields(ending)},
    )


def _calls(parts: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    by_index: dict[int, list[ToolCallDelta]] = defaultdict(list)
    for part in parts:
        by_index[part.index].append(part)
    return tuple(map(_call, by_index.values()))


def _call(parts: Sequence[ToolCallDelta]) -> ToolCall:
    """Join the parts of one call; the first has its id and name."""
    arguments = "".join(part.arguments for part in parts)
    return ToolCall(id=parts[0].id, name=parts[0].name, arguments=arguments)
