"""Log-probabilities as OpenAI's and vLLM's clients read them."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.engine.events import Logprob
from jaxserve.tokenizer import Tokenizer

LEAST = -9999.0  # in place of minus infinity, which JSON cannot write

Scored = tuple[
    int, Logprob | None
]  # a token of a text, and what is known of it: nothing of a prompt's first


def candidates(entry: Logprob, alternatives: int) -> dict[int, float]:
    """By token: so many of the most probable, and the chosen one, which has one value wherever it
    stands.
    """
    return {**dict(entry.top[:alternatives]), entry.token: entry.logprob}


class TextLogprobs:
    """Of one choice of a text completion, in pieces as they come.

    prompt: its token ids. echo: the text begins with it. Offsets count the characters of the text
    before a token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echo: bool, alternatives: int):
        self._tokenizer, self._alternatives = tokenizer, alternatives
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._opening, self._offset = True, 0
        if not echo:
            self._skip(prompt)

    def of(self, scored: Iterable[Scored]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, entry in scored:
            found["tokens"].append(self._tokenizer.token_text(token))
            found["token_logprobs"].append(entry and max(entry.logprob, LEAST))
            found["top_logprobs"].append(
                entry and self._by_text(candidates(entry, self._alternatives))
            )
            found["text_offset"].append(self._offset)
            self._pass(token)
        return found

    def _by_text(self, candidates: dict[int, float]) -> dict[str, float]:
        """Tokens that read the same, as parts of characters may, are told apart by their ids."""
        found = dict[str, float]()
        for token, logprob in reversed(candidates.items()):
            text = self._tokenizer.token_text(token)
            found[f"token_id:{token}" if text in found else text] = max(logprob, LEAST)
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
    def __init__(self, tokenizer: Tokenizer, alternatives: int):
        self._tokenizer, self._alternatives = tokenizer, alternatives

    def of(self, entries: Iterable[Logprob]) -> dict[str, list[Any]]:
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
            "bytes": list(data) or None,  # a special token is no text
        }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[Logprob] | None, alternatives: int
) -> list[dict[str, Any] | None]:
    """As vLLM has them: by token id, nothing for the first token; the rank only of those among the
    most probable.
    """

    def of(entry: Logprob) -> dict[str, Any]:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        return {
            str(token): {
                "logprob": max(logprob, LEAST),
                "rank": ranks.get(token),
                "decoded_token": tokenizer.token_text(token),
            }
            for token, logprob in candidates(entry, alternatives).items()
        }

    return [None, *(of(entry) for entry in entries or ())]
