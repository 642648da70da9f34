"""What both kinds of completion have: the envelope, the choices' numbers, and the count of
tokens."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxserve.chat.answers import ended_by
from jaxserve.completion import Completion
from jaxserve.server.core.answer_events import AnswerEvent, Done, Started, Update

Choice = dict[str, Any]


class Writer(Protocol):
    """Writes choices. prompt: the position of the answer's prompt among those of the request."""

    prefix: str  # of the reply's id
    whole_object: str
    chunk_object: str

    def opening(self) -> list[Choice]:
        """What a stream begins with."""
        ...

    def pieces(self, prompt: int, news: AnswerEvent) -> Iterator[Choice]:
        """The parts of choices that tell the news in a stream."""
        ...

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        """The fields that tell the whole: choices, and what belongs to none of them."""
        ...


@dataclass
class Meter:
    """Counts tokens. n: choices of a prompt. Choice k of prompt i has the index i * n + k."""

    n: int
    counts_output: bool = True
    prompts: dict[int, Started] = field(default_factory=dict)
    made: Counter[int] = field(default_factory=Counter)  # by choice
    drafted: int = 0  # tokens of choices that have ended
    accepted: int = 0

    def see(self, prompt: int, news: AnswerEvent) -> None:
        if isinstance(news, Started):
            self.prompts[prompt] = news
        elif isinstance(news, Update) and self.counts_output:
            self.made[prompt * self.n + news.index] += len(news.token_ids)
        elif isinstance(news, Done):
            self.drafted += sum(
                completion.timings.drafted_tokens for completion in news.completions
            )
            self.accepted += sum(
                completion.timings.accepted_tokens for completion in news.completions
            )

    def total(self) -> dict[str, Any]:
        """With drafted tokens, in OpenAI's words for predictions, where there were any."""
        usage = _usage(list(self.prompts.values()), self.made.total())
        if not self.drafted:
            return usage
        rejected = self.drafted - self.accepted
        predicted = {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": rejected,
        }
        return {**usage, "completion_tokens_details": predicted}

    def of_choice(self, index: int) -> dict[str, Any]:
        started = self.prompts.get(index // self.n)
        return _usage([started] if started else [], self.made[index])


def _usage(prompts: list[Started], made: int) -> dict[str, Any]:
    tokens = sum(started.prompt_tokens for started in prompts)
    return {
        "prompt_tokens": tokens,
        "completion_tokens": made,
        "total_tokens": tokens + made,
        "prompt_tokens_details": {
            "cached_tokens": sum(started.cached_tokens for started in prompts)
        },
    }


def ending(completion: Completion, eos_ids: Sequence[int], called: bool = False) -> dict[str, Any]:
    """Why a choice ended. stop_reason, as vLLM has it: the stop string or token id, null for the
    model's own end.

    called: it has calls of functions.
    """
    by = completion.stopped_by
    return {
        "finish_reason": ended_by(completion.finish_reason, called),
        "stop_reason": None if by in eos_ids else by,
    }


def envelope(
    kind: str, writer: Writer, request_id: str, created: int, model: str
) -> Mapping[str, Any]:
    return {
        "id": f"{writer.prefix}-{request_id}",
        "object": kind,
        "created": created,
        "model": model,
    }
