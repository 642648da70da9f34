"""Finds stop strings in a text that arrives in chunks."""

from collections.abc import Sequence

from jaxserve.tokenizer.protocol import TokenizerError


class StopFinder:
    """A filter that passes text through until a stop string is complete.

    Text that may begin a stop string is held back. The stop string that is complete first ends the
    text; of several that are complete with the same character, the longest. The result therefore
    does not depend on how the text is cut, and nothing waits for text after a match.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool) -> None:
        """Create a filter; TokenizerError for an empty stop string, which any text matches."""
        self._patterns = [_Pattern(text) for text in stop]
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Return the text that has become final; "" once a stop string was found.

        Takes O(len(piece)) steps for each stop string.
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
        """Return the text that was held back, at the end of the input."""
        held = self._held
        self._held = ""
        return held

    def _end(self, text: str, found: str) -> str:
        self.found = found
        self._held = ""
        return text if self._include_stop else text[: -len(found)]


class _Pattern:
    """A stop string and how much of it the text ends with (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        if not text:
            raise TokenizerError("stop: a stop string is empty; remove it")
        self.text = text
        self.matched = 0
        self._borders = _borders(text)

    def advance(self, letter: str) -> bool:
        """Add a letter of the text; return whether the string is complete with it.

        It must not be called again once the string is complete.
        """
        while self.matched and self.text[self.matched] != letter:
            self.matched = self._borders[self.matched - 1]
        if self.text[self.matched] == letter:
            self.matched += 1
        return self.matched == len(self.text)


def _borders(text: str) -> list[int]:
    """Return for each prefix of text the length of its longest border.

    A border is a proper prefix that is also a suffix.
    """
    borders = [0] * len(text)
    for end in range(1, len(text)):
        size = borders[end - 1]
        while size and text[size] != text[end]:
            size = borders[size - 1]
        borders[end] = size + 1 if text[size] == text[end] else size
    return borders
