"""A whole answer from the events of its stream."""

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
    """What generate or chat would have returned. ValueError when the stream was left before its
    end.
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
        tool_calls=_calls(news for delta in deltas for news in delta.tool_calls),
        **{field.name: getattr(ending, field.name) for field in fields(ending)},
    )


def _calls(news: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    calls: dict[int, list[ToolCallDelta]] = defaultdict(list)
    for piece in news:
        calls[piece.index].append(piece)
    return tuple(
        ToolCall(
            id=first.id,
            name=first.name,
            arguments="".join(piece.arguments for piece in (first, *rest)),
        )
        for first, *rest in calls.values()
    )
