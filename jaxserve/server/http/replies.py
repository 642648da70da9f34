"""Render what both kinds of completion share, as a whole reply or as the chunks of a stream."""

import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxserve.chat.answers import ended_by
from jaxserve.completion import Completion
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.answer_events import AnswerEvent, Done, Update
from jaxserve.server.core.internal_errors import mask_internal_error
from jaxserve.server.http.errors import error_body
from jaxserve.server.http.json import dumps
from jaxserve.server.http.streams import KEEP_ALIVE
from jaxserve.server.http.types import StreamOptions

ID_HEADER = "x-request-id"
STREAM_END = b"data: [DONE]\n\n"
HEADER_SAFE = re.compile("[!-~]+")  # printable ASCII without the space

Choice = dict[str, Any]


class Writer(Protocol):
    """Renders choices. `prompt` is the position of an answer's prompt among the request's."""

    prefix: str  # of the reply's id
    whole_object: str
    chunk_object: str

    def opening(self) -> list[Choice]:
        """Return the choices of a stream's first chunks."""
        ...

    def parts(self, prompt: int, event: AnswerEvent) -> Iterator[Choice]:
        """Yield the parts of choices that tell the event in a stream."""
        ...

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        """Return the choices, and the other fields that depend on the kind of completion."""
        ...


def id_header(request_id: str) -> dict[str, str]:
    """Return the header with the request's id, or none if a header cannot hold the id."""
    return {ID_HEADER: request_id} if HEADER_SAFE.fullmatch(request_id) else {}


def envelope(kind: str, writer: Writer, request_id: str, model: str) -> Mapping[str, Any]:
    """Return the fields before the choices of a reply that is made now."""
    return {
        "id": f"{writer.prefix}-{request_id}",
        "object": kind,
        "created": int(time.time()),  # seconds since the epoch
        "model": model,
    }


def ending(completion: Completion, eos_ids: Sequence[int], called: bool = False) -> dict[str, Any]:
    """Return the fields that say why a choice ended; `called` says that it calls functions.

    stop_reason is vLLM's: the stop string or token id, and null at one of the model's end tokens.
    """
    stopped_by = completion.stopped_by
    return {
        "finish_reason": ended_by(completion.finish_reason, called),
        "stop_reason": None if stopped_by in eos_ids else stopped_by,
    }


@dataclass
class UsageMeter:
    """Counts a request's tokens; choice k of prompt i has the index i * n + k."""

    n: int
    answers: Sequence[Answer]  # one for each prompt
    counts_output: bool = True
    generated: Counter[int] = field(default_factory=Counter)  # tokens by choice
    drafted: int = 0  # tokens of choices that have ended
    accepted: int = 0

    def count(self, prompt: int, event: AnswerEvent) -> None:
        """Take an event of a prompt's answer into account."""
        match event:
            case Update():
                if self.counts_output:
                    self.generated[prompt * self.n + event.index] += len(event.token_ids)
            case Done():
                for completion in event.completions:
                    self.drafted += completion.timings.drafted_tokens
                    self.accepted += completion.timings.accepted_tokens

    def total(self) -> dict[str, Any]:
        """Return the usage of the request, with OpenAI's prediction fields for drafted tokens."""
        usage = _usage(self.answers, self.generated.total())
        if not self.drafted:
            return usage
        predicted = {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.drafted - self.accepted,
        }
        return {**usage, "completion_tokens_details": predicted}

    def of_choice(self, index: int) -> dict[str, Any]:
        """Return the usage of one choice so far."""
        return _usage([self.answers[index // self.n]], self.generated[index])


def _usage(answers: Sequence[Answer], generated: int) -> dict[str, Any]:
    """Return the usage of prompts and their outputs; what is cached is not known before a row."""
    tokens = sum(answer.prompt_tokens for answer in answers)
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    details = {"cached_tokens": sum(cached)} if len(cached) == len(answers) else None
    return {
        "prompt_tokens": tokens,
        "completion_tokens": generated,
        "total_tokens": tokens + generated,
        "prompt_tokens_details": details,
    }


class Chunks:
    """Renders one stream as server-sent events, each with the envelope's fields."""

    def __init__(
        self, head: Mapping[str, Any], writer: Writer, meter: UsageMeter, options: StreamOptions
    ):
        self._head = head
        self._writer = writer
        self._meter = meter
        self._options = options

    async def events(
        self, events: AsyncGenerator[tuple[int, AnswerEvent] | None]
    ) -> AsyncGenerator[bytes]:
        """Yield bytes for each event, from the opening to [DONE] or to an error; some are empty.

        Args:
            events: Those of the answers, with their positions; None stands for a comment that
                keeps the connection open.
        """
        try:
            yield self._frames(self._writer.opening())
            async with aclosing(events):
                async for event in events:
                    yield KEEP_ALIVE if event is None else self._render(*event)
            yield self._usage() + STREAM_END
        except Exception as error:
            # The status was sent long ago, so an error can only be an event of the stream.
            yield frame(error_body(mask_internal_error(error)))

    def _render(self, prompt: int, event: AnswerEvent) -> bytes:
        self._meter.count(prompt, event)
        return self._frames(self._writer.parts(prompt, event))

    def _frames(self, choices: Iterable[Choice]) -> bytes:
        """Render one event for each choice."""
        return b"".join(
            frame({**self._head, "choices": [choice], **self._usage_so_far(choice)})
            for choice in choices
        )

    def _usage_so_far(self, choice: Choice) -> dict[str, Any]:
        if self._options.continuous_usage_stats:
            return {"usage": self._meter.of_choice(choice["index"])}
        return {"usage": None} if self._options.include_usage else {}

    def _usage(self) -> bytes:
        if not self._options.include_usage:
            return b""
        return frame({**self._head, "choices": [], "usage": self._meter.total()})


def frame(value: Mapping[str, Any]) -> bytes:
    """Render one server-sent event whose data is JSON."""
    return b"data: " + dumps(value) + b"\n\n"
