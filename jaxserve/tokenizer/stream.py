"""Token ids that arrive a few at a time, as text that is final when it leaves."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from jaxserve.tokenizer.protocol import Tokenizer
from jaxserve.tokenizer.stop import StopFinder
from jaxserve.tokenizer.utf8 import LONGEST_UNFINISHED, joined_bytes, unfinished

NOTHING: Mapping[int, str] = MappingProxyType({})


class StreamDecoder:
    """Decodes a completion while it grows.

    The rule: a completion's text is what its tokens add to the text of the prompt, so a first word
    keeps the space before it, unless the prompt has no text (only special tokens): then it opens
    the text and a dummy space is dropped. If the prompt ends inside a character, that character
    belongs to the completion.

    Without a stop string, the pieces joined equal completion_text() exactly, and for an empty
    prompt tokenizer.decode(), however the ids are cut into pushes. Half a character is never
    emitted: at most three bytes wait for the rest of theirs. A push costs O(its ids and their
    text), whatever came before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        spelled: Mapping[int, str] = NOTHING,
    ) -> None:
        """prompt_ids: the prompt, of which only the two ends are read. include_stop: the text keeps
        the stop string.

        spelled: special tokens that are text here, and what they spell.

        Raises:
            TokenizerError: a stop string is empty.
        """
        self._tokenizer, self._spelled = tokenizer, spelled
        self._opening = _is_opening(tokenizer, prompt_ids)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters.decode(unfinished(_last_bytes(tokenizer, prompt_ids)))
        self._stop = StopFinder(stop, include_stop)
        self._pushed = 0
        self._stop_token_count: int | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stop.found

    @property
    def stop_token_count(self) -> int | None:
        """How many of the pushed ids the text needed, up to the one that completed the stop string;
        None without.
        """
        return self._stop_token_count

    def push(self, ids: Iterable[int]) -> str:
        """Text that has become final with these ids; ids after a stop string add nothing."""
        return "".join(self._push(token_id) for token_id in ids)

    def finish(self) -> str:
        """The rest of the text, when no more ids will come: what was held back, an unfinished
        character as U+FFFD.
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
        if self.stopped is not None and self._stop_token_count is None:
            self._stop_token_count = self._pushed
        return final


def completion_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """The whole text of a completion by StreamDecoder's rule, at once; costs O(prompt)."""
    prompt = joined_bytes(tokenizer, prompt_ids)
    whole = joined_bytes(tokenizer, [*prompt_ids, *ids])
    return whole[len(prompt) - len(unfinished(prompt)) :].decode("utf-8", "replace")


def _is_opening(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether a text is still to be opened after the prompt; most prompts tell with their first
    word.
    """
    opening = True
    for token_id in prompt_ids:
        _, opening = tokenizer.token_bytes(token_id, opening)
        if not opening:
            break
    return opening


def _last_bytes(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bytes:
    """As much of the end of the prompt's text as can belong to an unfinished character, or more."""
    data = b""
    for token_id in reversed(prompt_ids):
        data = tokenizer.token_bytes(token_id)[0] + data
        if len(data) >= LONGEST_UNFINISHED:
            break
    return data
