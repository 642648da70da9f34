"""Render text completions in OpenAI's form."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from jaxserve.completion import Completion
from jaxserve.engine.events import Logprob
from jaxserve.server.core.answer_events import AnswerEvent, Done, PromptScores, Update
from jaxserve.server.http.calls import scores_only
from jaxserve.server.http.logprobs import TextLogprobs, TokenEntry, prompt_logprobs
from jaxserve.server.http.replies import Choice, ending
from jaxserve.server.http.types import CompletionBody
from jaxserve.tokenizer import Tokenizer


class CompletionWriter:
    """A `Writer` of text completions; `prompts` has the token ids of each prompt."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        prompts: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
        eos_ids: tuple[int, ...],
    ):
        self._body = body
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._prompt_scores: list[list[Logprob]] = [[] for _ in prompts]
        # Updates, by prompt, that wait for the prompt's own log-probabilities: with echo these
        # come first in the text.
        self._held: list[list[Update]] = [[] for _ in prompts]
        self._text_logprobs: dict[int, TextLogprobs] = {}  # by index of the choice

    # ---- a stream

    def opening(self) -> list[Choice]:
        return []

    def parts(self, prompt: int, event: AnswerEvent) -> Iterator[Choice]:
        match event:
            case PromptScores():
                self._prompt_scores[prompt] += event.entries
            case Update():
                self._held[prompt].append(event)
        if isinstance(event, Done) or self._prompt_is_scored(prompt):
            held = self._held[prompt]
            self._held[prompt] = []
            for update in held:
                yield from self._part(prompt, update)
        if isinstance(event, Done):
            for completion in event.completions:
                index = self._index(prompt, completion.index)
                yield self._choice(index, "", None) | ending(completion, self._eos_ids)

    def _prompt_is_scored(self, prompt: int) -> bool:
        if not (self._body.echo and self._body.logprobs is not None):
            return True
        # A prompt's first token has no log-probability.
        return len(self._prompt_scores[prompt]) == len(self._prompts[prompt]) - 1

    def _part(self, prompt: int, update: Update) -> Iterator[Choice]:
        index = self._index(prompt, update.index)
        logprobs = self._logprobs(prompt, index, update.logprobs or (), self._prompt_scores[prompt])
        if update.text or logprobs:
            yield self._choice(index, update.text, logprobs)

    # ---- a whole reply

    def whole(self, dones: Sequence[Done]) -> dict[str, Any]:
        return {
            "choices": [
                self._whole(prompt, completion, done.completions[0].prompt_logprobs or ())
                for prompt, done in enumerate(dones)
                for completion in done.completions
            ]
        }

    def _whole(
        self, prompt: int, completion: Completion, prompt_scores: Sequence[Logprob]
    ) -> Choice:
        if scores_only(self._body):
            completion = _without_output(completion)
        index = self._index(prompt, completion.index)
        logprobs = self._logprobs(prompt, index, completion.logprobs or (), prompt_scores)
        choice = self._choice(index, completion.text, logprobs)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, prompt_scores, self._body.prompt_logprobs
            )
        return choice | ending(completion, self._eos_ids)

    # ---- both

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
        self, prompt: int, index: int, output: Sequence[Logprob], prompt_scores: Sequence[Logprob]
    ) -> dict[str, Any] | None:
        """Render the log-probabilities of a choice's next tokens.

        With echo, the first call for a choice puts the prompt's before them.
        """
        ids = self._prompts[prompt]
        alternatives = self._body.logprobs
        if alternatives is None:
            return None
        tokens: list[TokenEntry] = [(entry.token, entry) for entry in output]
        if index not in self._text_logprobs:
            self._text_logprobs[index] = TextLogprobs(
                self._tokenizer, ids, self._body.echo, alternatives
            )
            if self._body.echo:
                # zip_longest: a request that ended early has fewer scores than prompt tokens.
                tokens = [*zip_longest(ids, [None, *prompt_scores]), *tokens]
        return self._text_logprobs[index].render(tokens)


def _without_output(completion: Completion) -> Completion:
    """Return the completion of max_tokens 0: the echoed prompt without the one generated token."""
    reason = completion.finish_reason if completion.finish_reason == "abort" else "length"
    return replace(
        completion, text=completion.prompt, logprobs=(), finish_reason=reason, stopped_by=None
    )
