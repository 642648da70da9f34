"""Decodes token ids that arrive a few at a time into text that is final."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from jaxserve.tokenizer.protocol import Tokenizer
from jaxserve.tokenizer.stop import StopFinder
from jaxserve.tokenizer.utf8 import LONGEST_UNFINISHED, joined_bytes, unfinished

NOTHING: Mapping[int, str] = MappingProxyType({})


class StreamDecoder:
    """Decoder of a completion that grows.

    A completion's text is what its tokens add to the text of the prompt. A first word therefore
    keeps the space before it, unless the prompt has no text (only special tokens): then it opens
    the text and a dummy space is dropped. If the prompt ends inside a character, that character
    belongs to the completion.

    Without a stop string, the returned texts joined equal completion_text(), and for an empty
    prompt tokenizer.decode(), however the ids are divided among pushes. Half a character is never
    returned: up to three bytes wait for the rest of their character. A push takes time in
    proportion to its ids and their text, whatever came before.

    Args:
        tokenizer: The tokenizer of the ids.
        prompt_ids: The prompt, of which only the two ends are read.
        stop: Strings that end the text.
        include_stop: Whether the text keeps the stop string.
        spelled: Special tokens that are text here, with the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        spelled: Mapping[int, str] = NOTHING,
    ) -> None:
        """Create a decoder.

        Raises:
            TokenizerError: A stop string is empty.
        """
        self._tokenizer = tokenizer
        self._spelled = spelled
        self._opening = _is_opening(tokenizer, prompt_ids)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters.decode(unfinished(_last_bytes(tokenizer, prompt_ids)))
        self._stop = StopFinder(stop, include_stop)
        self._pushed = 0
        # Number of pushed ids up to the one that completed the stop string; None without.
        self.stop_token_count: int | None = None

    @property
    def stopped(self) -> str | None:
        """Stop string that ended the text, if one did."""
        return self._stop.found

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that has become final; ids after a stop string add nothing."""
        return "".join(self._push(token_id) for token_id in ids)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the input.

        An unfinished character becomes U+FFFD.
        """
        return self._emit(self._characters.decode(b"", final=True)) + self._stop.flush()

    def _push(self, token_id: int) -> str:
        if self.stopped is not None:
            return ""
        self._pushed += 1
        if token_id in self._spelled:
            piece = self._spelled[token_id].encode()
        else:
            piece, self._opening = self._tokenizer.token_bytes(token_id, self._opening)
        return self._emit(self._characters.decode(piece))

    def _emit(self, text: str) -> str:
        final = self._stop.push(text)
        if self.stopped is not None and self.stop_token_count is None:
            self.stop_token_count = self._pushed
        return final


def completion_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Decode a whole completion by the rule of StreamDecoder, in time O(prompt)."""
    prompt = joined_bytes(tokenizer, prompt_ids)
    whole = joined_bytes(tokenizer, [*prompt_ids, *ids])
    return whole[len(prompt) - len(unfinished(prompt)) :].decode("utf-8", "replace")


def _is_opening(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Return whether the prompt leaves the text unopened; most prompts open it at once."""
    opening = True
    for token_id in prompt_ids:
        _, opening = tokenizer.token_bytes(token_id, opening)
        if not opening:
            break
    return opening


def _last_bytes(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bytes:
    """Return at least as much of the prompt's end as can belong to an unfinished character."""
    data = b""
    for token_id in reversed(prompt_ids):
        data = tokenizer.token_bytes(token_id)[0] + data
        if len(data) >= LONGEST_UNFINISHED:
            break
    return data
