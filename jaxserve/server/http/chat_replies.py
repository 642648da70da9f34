"""Render chat completions in OpenAI's form."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxserve.chat.answers import AnswerParser, Arguments, Call, Content, Part, Reading, Reasoning
from jaxserve.completion import Completion
from jaxserve.engine.events import Logprob
from jaxserve.server.core.answer_events import AnswerEvent, Done, Update
from jaxserve.server.http.logprobs import ChatLogprobs, prompt_logprobs
from jaxserve.server.http.replies import Choice, ending
from jaxserve.server.http.types import ChatBody
from jaxserve.tokenizer import Tokenizer

ROLE = "assistant"


class ChatWriter:
    """A `Writer` of chat completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, body: ChatBody, reading: Reading, tokenizer: Tokenizer, eos_ids: tuple[int, ...]
    ):
        self._body = body
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._reading = reading if body.separate_reasoning else _unseparated(reading)
        self._parsers = [AnswerParser(self._reading) for _ in range(body.n)]
        self._logprob_entries = ChatLogprobs(tokenizer, body.top_logprobs or 0)

    # ---- a stream

    def opening(self) -> list[Choice]:
        return [self._part(index, {"role": ROLE, "content": ""}) for index in range(self._body.n)]

    def parts(self, prompt: int, event: AnswerEvent) -> Iterator[Choice]:
        match event:
            case Update():
                yield from self._update(event)
            case Done():
                for completion in event.completions:
                    yield from self._last(completion)

    def _update(self, event: Update) -> Iterator[Choice]:
        logprobs = self._logprobs(event.logprobs)
        deltas = [_delta(part) for part in self._parsers[event.index].feed(event.text)]
        if event.logprobs and not deltas:
            # The tokens' text is not settled yet, but their log-probabilities come now.
            deltas = [{"content": ""}]
        for delta in deltas:
            yield self._part(event.index, delta, logprobs)
            logprobs = None  # the first delta of an update carries all of them

    def _last(self, completion: Completion) -> Iterator[Choice]:
        parser = self._parsers[completion.index]
        for part in parser.end():
            yield self._part(completion.index, _delta(part))
        yield self._part(completion.index, {}) | ending(completion, self._eos_ids, parser.called)

    def _part(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> Choice:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    # ---- a whole reply

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        (done,) = dones  # a chat has one prompt
        fields: dict[str, Any] = {
            "choices": [self._whole(completion) for completion in done.completions]
        }
        if self._body.prompt_logprobs is not None:
            entries = done.completions[0].prompt_logprobs
            fields["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, entries, self._body.prompt_logprobs
            )
        return fields

    def _whole(self, completion: Completion) -> Choice:
        answer = self._reading.read(completion.text)
        message: dict[str, Any] = {"role": ROLE, "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                _call(call.id, call.name, arguments) for call, arguments in answer.calls
            ]
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs),
        } | ending(completion, self._eos_ids, bool(answer.calls))

    def _logprobs(self, entries: Sequence[Logprob] | None) -> dict[str, Any] | None:
        return None if entries is None else self._logprob_entries.render(entries)


def _unseparated(reading: Reading) -> Reading:
    """Return the rules for an answer whose thought is content.

    A call that the thought begins is guarded by no grammar.
    """
    return replace(reading, thinks=False, certain=False)


def _delta(part: Part) -> dict[str, Any]:
    """Render a part of an answer; reasoning_content is the name that DeepSeek's API uses."""
    match part:
        case Content():
            return {"content": part.text}
        case Reasoning():
            return {"reasoning_content": part.text}
        case Call():
            return {"tool_calls": [{"index": part.index} | _call(part.id, part.name, "")]}
        case Arguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
