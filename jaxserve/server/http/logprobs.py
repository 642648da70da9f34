"""Render log-probabilities in the forms of OpenAI's and vLLM's clients."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.engine.events import Logprob
from jaxserve.tokenizer import Tokenizer

LEAST = -9999.0  # in place of minus infinity, which JSON cannot write

# A token of a text with its entry; a prompt's first token has none.
TokenEntry = tuple[int, Logprob | None]


def candidates(entry: Logprob, alternatives: int) -> dict[int, float]:
    """Return log-probabilities by token id: the most probable ones, and the chosen token's.

    The chosen token comes last unless it is among the first `alternatives`, and has its own value
    in either place.
    """
    return {**dict(entry.top[:alternatives]), entry.token: entry.logprob}


class TextLogprobs:
    """Renders the log-probabilities of one choice of a text completion, part by part.

    Offsets count the characters of the text before a token. With `echo`, the text begins with the
    prompt, whose token ids are `prompt`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echo: bool, alternatives: int):
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        # A character may be spread over several tokens: it counts with the token that ends it.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._opening = True  # at the text's beginning, where tokenizers may drop a space
        self._offset = 0
        if not echo:
            self._skip(prompt)

    def render(self, tokens: Iterable[TokenEntry]) -> dict[str, list[Any]]:
        """Return the lists of OpenAI's `logprobs` for the text's next tokens."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        found: dict[str, list[Any]] = {name: [] for name in names}
        for token, entry in tokens:
            found["tokens"].append(self._tokenizer.token_text(token))
            if entry is None:
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
            else:
                found["token_logprobs"].append(max(entry.logprob, LEAST))
                found["top_logprobs"].append(self._by_text(candidates(entry, self._alternatives)))
            found["text_offset"].append(self._offset)
            self._pass(token)
        return found

    def _by_text(self, candidates: dict[int, float]) -> dict[str, float]:
        """Key the candidates by text, or by id where a text occurs twice, as parts of bytes may."""
        found = dict[str, float]()
        # In reverse, so that a chosen token from outside the top, the last, keeps its text.
        for token, logprob in reversed(candidates.items()):
            text = self._tokenizer.token_text(token)
            key = f"token_id:{token}" if text in found else text
            found[key] = max(logprob, LEAST)
        return found

    def _pass(self, token: int) -> None:
        piece, self._opening = self._tokenizer.token_bytes(token, self._opening)
        self._offset += len(self._characters.decode(piece))

    def _skip(self, prompt: Sequence[int]) -> None:
        for token in prompt:
            _, self._opening = self._tokenizer.token_bytes(token, self._opening)
            if not self._opening:
                break


class ChatLogprobs:
    """Renders the log-probabilities of chat completions."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int):
        self._tokenizer = tokenizer
        self._alternatives = alternatives

    def render(self, entries: Iterable[Logprob]) -> dict[str, list[Any]]:
        return {"content": [self._entry(entry) for entry in entries]}

    def _entry(self, entry: Logprob) -> dict[str, Any]:
        known = candidates(entry, self._alternatives)
        top = [self._token(token, known[token]) for token, _ in entry.top[: self._alternatives]]
        return self._token(entry.token, entry.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data, _ = self._tokenizer.token_bytes(token)
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": max(logprob, LEAST),
            "bytes": list(data) or None,  # a special token has no bytes
        }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[Logprob] | None, alternatives: int
) -> list[dict[str, Any] | None]:
    """Render a prompt's log-probabilities in vLLM's form, by token id.

    The first token has none. Only tokens among the most probable have a rank.
    """

    def render(entry: Logprob) -> dict[str, Any]:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        return {
            str(token): {
                "logprob": max(logprob, LEAST),
                "rank": ranks.get(token),
                "decoded_token": tokenizer.token_text(token),
            }
            for token, logprob in candidates(entry, alternatives).items()
        }

    return [None, *(render(entry) for entry in entries or ())]
