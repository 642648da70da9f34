"""Chat completions as OpenAI's clients read them."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.completion import Completion
from jaxserve.engine.plan import Logprob
from jaxserve.server.http.logprobs import ChatLogprobs, prompt_logprobs
from jaxserve.server.http.replies import Choice, ending
from jaxserve.server.http.types import ChatBody
from jaxserve.server.news import Done, News, Update
from jaxserve.tokenizer import Tokenizer

ROLE = "assistant"


class ChatWriter:
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, tokenizer: Tokenizer, eos_ids: tuple[int, ...]):
        self._body, self._tokenizer, self._eos_ids = body, tokenizer, eos_ids
        self._scores = ChatLogprobs(tokenizer, body.top_logprobs or 0)

    def opening(self) -> list[Choice]:
        return [self._piece(index, {"role": ROLE, "content": ""}) for index in range(self._body.n)]

    def pieces(self, prompt: int, news: News) -> Iterator[Choice]:
        match news:
            case Update() if news.text or news.logprobs:
                yield self._piece(news.index, {"content": news.text}, self._logprobs(news.logprobs))
            case Done():
                for completion in news.completions:
                    yield self._piece(completion.index, {}) | ending(completion, self._eos_ids)

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        (done,) = dones
        fields: dict[str, Any] = {"choices": [self._whole(completion) for completion in done.completions]}
        if self._body.prompt_logprobs is not None:
            scores = done.completions[0].prompt_logprobs
            fields["prompt_logprobs"] = prompt_logprobs(self._tokenizer, scores, self._body.prompt_logprobs)
        return fields

    def _whole(self, completion: Completion) -> Choice:
        return {
            "index": completion.index,
            "message": {"role": ROLE, "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.logprobs),
        } | ending(completion, self._eos_ids)

    def _piece(self, index: int, delta: dict[str, str], logprobs: dict[str, Any] | None = None) -> Choice:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, entries: Sequence[Logprob] | None) -> dict[str, Any] | None:
        return None if entries is None else self._scores.of(entries)
