"""Text completions as OpenAI's clients read them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from jaxserve.completion import Completion
from jaxserve.engine.events import Logprob
from jaxserve.server.core.answer_events import AnswerEvent, Done, PromptScores, Update
from jaxserve.server.http.calls import scores_only
from jaxserve.server.http.logprobs import Scored, TextLogprobs, prompt_logprobs
from jaxserve.server.http.replies import Choice, ending
from jaxserve.server.http.types import CompletionBody
from jaxserve.tokenizer import Tokenizer


class CompletionWriter:
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        prompts: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
        eos_ids: tuple[int, ...],
    ):
        self._body, self._prompts, self._tokenizer, self._eos_ids = (
            body,
            prompts,
            tokenizer,
            eos_ids,
        )
        self._scores: list[list[Logprob]] = [[] for _ in prompts]
        self._held: list[list[Update]] = [
            [] for _ in prompts
        ]  # until the prompt's own log-probabilities are there
        self._texts: dict[int, TextLogprobs] = {}  # by choice

    # ---- a stream

    def opening(self) -> list[Choice]:
        return []

    def pieces(self, prompt: int, news: AnswerEvent) -> Iterator[Choice]:
        match news:
            case PromptScores():
                self._scores[prompt] += news.entries
            case Update():
                self._held[prompt].append(news)
        if isinstance(news, Done) or self._scored(prompt):
            held, self._held[prompt] = self._held[prompt], []
            for update in held:
                yield from self._piece(prompt, update)
        if isinstance(news, Done):
            for completion in news.completions:
                index = self._index(prompt, completion.index)
                yield self._choice(index, "", None) | ending(completion, self._eos_ids)

    def _scored(self, prompt: int) -> bool:
        return (
            not self._echoes_scores or len(self._scores[prompt]) == len(self._prompts[prompt]) - 1
        )

    def _piece(self, prompt: int, update: Update) -> Iterator[Choice]:
        index = self._index(prompt, update.index)
        logprobs = self._logprobs(prompt, index, update.logprobs or (), self._scores[prompt])
        if update.text or logprobs:
            yield self._choice(index, update.text, logprobs)

    # ---- the whole

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        return {
            "choices": [
                self._whole(prompt, completion, done.completions[0].prompt_logprobs or ())
                for prompt, done in enumerate(dones)
                for completion in done.completions
            ]
        }

    def _whole(self, prompt: int, completion: Completion, scores: Sequence[Logprob]) -> Choice:
        if scores_only(self._body):
            completion = _emptied(completion)
        index = self._index(prompt, completion.index)
        logprobs = self._logprobs(prompt, index, completion.logprobs or (), scores)
        choice = self._choice(index, completion.text, logprobs)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, scores, self._body.prompt_logprobs
            )
        return choice | ending(completion, self._eos_ids)

    # ---- both

    @property
    def _echoes_scores(self) -> bool:
        return self._body.echo and self._body.logprobs is not None

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self._body.n + choice

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None) -> Choice:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
        }

    def _logprobs(
        self, prompt: int, index: int, own: Sequence[Logprob], scores: Sequence[Logprob]
    ) -> dict[str, Any] | None:
        """Of the choice's next tokens; before the first of them, with echo, of the prompt's."""
        ids, alternatives = self._prompts[prompt], self._body.logprobs
        if alternatives is None:
            return None
        scored: list[Scored] = [(entry.token, entry) for entry in own]
        if index not in self._texts:
            self._texts[index] = TextLogprobs(self._tokenizer, ids, self._body.echo, alternatives)
            if self._body.echo:
                scored = [*zip_longest(ids, [None, *scores]), *scored]
        return self._texts[index].of(scored)


def _emptied(completion: Completion) -> Completion:
    """Of max_tokens 0: what was generated goes, the prompt that is echoed stays."""
    reason = completion.finish_reason if completion.finish_reason == "abort" else "length"
    return replace(
        completion, text=completion.prompt, logprobs=(), finish_reason=reason, stopped_by=None
    )
