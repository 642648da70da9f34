"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence

from jaxserve.tokenizer.protocol import TokenizerError


class StopFinder:
    """Passes text through until a stop string is complete in it; holds back what may be the
    beginning of one.

    The stop string that is complete first ends the text; of several complete with the same
    character, the longest. So the answer does not depend on how the text is cut into pieces, and
    nothing waits for text after a match.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool) -> None:
        """Raises TokenizerError for an empty stop string, which every text would match."""
        self._patterns = [_Pattern(text) for text in stop]
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Text that has become final, in O(len(piece)) steps for each stop string; nothing once one
        is found.
        """
        if not self._patterns:
            return piece
        if self.found is not None:
            return ""
        text = self._held + piece
        for end, letter in enumerate(piece, start=len(self._held) + 1):
            complete = [pattern.text for pattern in self._patterns if pattern.advance(letter)]
            if complete:
                return self._end(text[:end], max(complete, key=len))
        undecided = max((pattern.matched for pattern in self._patterns), default=0)
        self._held = text[len(text) - undecided :]
        return text[: len(text) - undecided]

    def flush(self) -> str:
        """The text that was held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, found: str) -> str:
        self.found, self._held = found, ""
        return text if self._include_stop else text[: -len(found)]


class _Pattern:
    """One stop string and how much of it the text so far ends with (Knuth, Morris and Pratt
    1977)."""

    def __init__(self, text: str) -> None:
        if not text:
            raise TokenizerError("stop: a stop string is empty; remove it")
        self.text = text
        self.matched = 0
        self._borders = _borders(text)

    def advance(self, letter: str) -> bool:
        """Whether the string is complete with this letter; not to be called again after that."""
        while self.matched and self.text[self.matched] != letter:
            self.matched = self._borders[self.matched - 1]
        self.matched += self.text[self.matched] == letter
        return self.matched == len(self.text)


def _borders(text: str) -> list[int]:
    """For each prefix of text, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    for end in range(1, len(text)):
        size = borders[end - 1]
        while size and text[size] != text[end]:
            size = borders[size - 1]
        borders[end] = size + (text[size] == text[end])
    return borders
