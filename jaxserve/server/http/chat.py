"""Chat completions as OpenAI's clients read them."""

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
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, body: ChatBody, reading: Reading, tokenizer: Tokenizer, eos_ids: tuple[int, ...]
    ):
        self._body, self._tokenizer, self._eos_ids = body, tokenizer, eos_ids
        self._reading = reading if body.separate_reasoning else replace(reading, thinks=False)
        self._parsers = [AnswerParser(self._reading) for _ in range(body.n)]
        self._scores = ChatLogprobs(tokenizer, body.top_logprobs or 0)

    def opening(self) -> list[Choice]:
        return [self._piece(index, {"role": ROLE, "content": ""}) for index in range(self._body.n)]

    def pieces(self, prompt: int, news: AnswerEvent) -> Iterator[Choice]:
        match news:
            case Update():
                yield from self._update(news)
            case Done():
                for completion in news.completions:
                    yield from self._last(completion)

    def _update(self, news: Update) -> Iterator[Choice]:
        logprobs = self._logprobs(news.logprobs)
        deltas = [_delta(part) for part in self._parsers[news.index].feed(news.text)]
        if news.logprobs and not deltas:
            deltas = [{"content": ""}]  # of a token whose text is not settled yet
        for delta in deltas:
            yield self._piece(news.index, delta, logprobs)
            logprobs = None

    def _last(self, completion: Completion) -> Iterator[Choice]:
        parser = self._parsers[completion.index]
        for part in parser.end():
            yield self._piece(completion.index, _delta(part))
        yield self._piece(completion.index, {}) | ending(completion, self._eos_ids, parser.called)

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        (done,) = dones
        fields: dict[str, Any] = {
            "choices": [self._whole(completion) for completion in done.completions]
        }
        if self._body.prompt_logprobs is not None:
            scores = done.completions[0].prompt_logprobs
            fields["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, scores, self._body.prompt_logprobs
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

    def _piece(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> Choice:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, entries: Sequence[Logprob] | None) -> dict[str, Any] | None:
        return None if entries is None else self._scores.of(entries)


def _delta(part: Part) -> dict[str, Any]:
    """Of OpenAI's shape; reasoning_content is the name that DeepSeek's own API gave the thought."""
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
