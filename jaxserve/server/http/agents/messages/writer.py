"""Answers in the form of Anthropic's API."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxserve.chat.answers import Arguments, Call, Content, Part, Reasoning
from jaxserve.completion import Completion
from jaxserve.engine.events import FinishReason
from jaxserve.errors import JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.http.agents.listed import json_of
from jaxserve.server.http.agents.messages.conversation import client_id, input_of
from jaxserve.server.http.agents.turns import Ended, Event, Usage
from jaxserve.server.http.anthropic_errors import anthropic_error_body
from jaxserve.server.security.seals import Seals

TEXT = "text"
THINKING = "thinking"
TOOL_USE = "tool_use"


class Asked(NamedTuple):
    """Fields of a request that its answer depends on, beside the model's text.

    Attributes:
        id: Id of the request.
        model: Name of the model.
        max_tokens: Most tokens that the client asked for.
        omits_thoughts: Whether the text of thoughts is left out; their signatures hold it.
    """

    id: str
    model: str
    max_tokens: int
    omits_thoughts: bool


class MessageWriter:
    """A `TurnWriter` of messages.

    Each block is told as it grows; the whole message is made of the blocks that were told.
    """

    def __init__(self, asked: Asked, seals: Seals):
        self._asked = asked
        self._seals = seals
        self._content: list[dict[str, Any]] = []  # blocks that are complete
        self._open: dict[str, Any] | None = None  # the start of the block that grows
        self._text = ""  # of that block
        self._end: dict[str, Any] = {}  # fields of the message that its end decides

    def opening(self, answer: Answer) -> Iterator[Event]:
        """Yield the events before the first block."""
        cached = answer.cached_tokens or 0
        usage = _usage(Usage(answer.prompt_tokens, cached, generated=0, thought=0))
        end = {"stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=self._message([], end))
        yield _event("ping")

    def part(self, part: Part) -> Iterator[Event]:
        """Yield the events that tell a part; neighbours of one kind are one block."""
        match part:
            case Content():
                yield from self._grow({"type": TEXT, "text": ""}, part.text)
            case Reasoning():
                start = {"type": THINKING, "thinking": "", "signature": ""}
                yield from self._grow(start, part.text)
            case Call():
                yield from self._close()
                id = client_id(part.id)
                yield self._begin({"type": TOOL_USE, "id": id, "name": part.name, "input": {}})
            case Arguments():
                text = _readable(part.text)
                self._text += text
                yield self._delta(type="input_json_delta", partial_json=text)

    def end(self, ended: Ended) -> Iterator[Event]:
        """Yield the end of the last block and of the message."""
        yield from self._close()
        reason, sequence = _stop(ended, self._asked.max_tokens)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._end = {**delta, "usage": _usage(ended.usage)}
        yield _event("message_delta", delta=delta, usage=self._end["usage"])
        yield _event("message_stop")

    def failure(self, error: JaxserveError) -> Iterator[Event]:
        """Yield the event of an error."""
        yield "error", anthropic_error_body(error, self._asked.id)

    def whole(self) -> Mapping[str, Any]:
        """Return the message."""
        return self._message(self._content, self._end)

    def _message(self, content: list[dict[str, Any]], end: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._asked.id}",
            "type": "message",
            "role": "assistant",
            "model": self._asked.model,
            "content": content,
            **end,
        }

    # ---- blocks

    def _grow(self, start: dict[str, Any], text: str) -> Iterator[Event]:
        """Add text to the block that is open, or to a new one where it is of another kind."""
        if not text:
            return
        if self._open is None or self._open["type"] != start["type"]:
            yield from self._close()
            yield self._begin(start)
        self._text += text
        if start["type"] == TEXT:
            yield self._delta(type="text_delta", text=text)
        elif not self._asked.omits_thoughts:
            yield self._delta(type="thinking_delta", thinking=text)

    def _begin(self, start: dict[str, Any]) -> Event:
        self._open = start
        self._text = ""
        return _event("content_block_start", index=len(self._content), content_block=start)

    def _delta(self, **delta: Any) -> Event:
        return _event("content_block_delta", index=len(self._content), delta=delta)

    def _close(self) -> Iterator[Event]:
        """End the block that is open."""
        if self._open is None:
            return
        block = self._open | self._rest(self._open["type"])
        if block["type"] == THINKING:
            yield self._delta(type="signature_delta", signature=block["signature"])
        yield _event("content_block_stop", index=len(self._content))
        self._content.append(block)
        self._open = None

    def _rest(self, kind: str) -> dict[str, Any]:
        """Return the fields that a complete block has, and its start has not."""
        if kind == TEXT:
            return {"text": self._text}
        if kind == TOOL_USE:
            return {"input": input_of(self._text)}
        if self._asked.omits_thoughts:
            return {"signature": self._seals.seal(self._text)}
        return {"thinking": self._text, "signature": self._seals.sign(self._text)}


def _readable(arguments: str) -> str:
    """Return arguments that clients can read.

    Whole ones may have halves of surrogate pairs, and numbers beyond a double's; the pieces of
    others are what the grammar of the call allows.
    """
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    if not isinstance(given, dict):
        return arguments  # a piece
    read = input_of(arguments)
    return arguments if read == given else json_of(read)


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name, **fields}


def _stop(ended: Ended, max_tokens: int) -> tuple[str, str | None]:
    """Return why an answer ended, and the stop sequence that ended it.

    Anthropic's API has no word for an answer that an operator has aborted: it is complete as it is,
    so that no client goes on by itself.
    """
    completion: Completion = ended.completion
    if completion.finish_reason == FinishReason.LENGTH:
        # The answer was to be longer, and the context had no room.
        is_full = ended.usage.generated < max_tokens
        return ("model_context_window_exceeded" if is_full else "max_tokens"), None
    if ended.called:
        return TOOL_USE, None
    if isinstance(completion.stopped_by, str):
        return "stop_sequence", completion.stopped_by
    return "end_turn", None


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the tokens of a message; those of the prompt that were cached are counted apart."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
        "output_tokens_details": {"thinking_tokens": usage.thought},
    }
