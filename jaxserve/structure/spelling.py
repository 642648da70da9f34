"""Spells bytes with the tokens of a vocabulary."""

from collections import defaultdict
from collections.abc import Sequence


class Speller:
    """Vocabulary in which the longest token at a place is found.

    An encoder may rewrite its text (Unicode normalization, lower case) or lack a letter. Where a
    text has to come out byte for byte, tokens are chosen by their bytes instead.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        """Create a speller; texts: bytes of each token by its id, b"" for one that spells none."""
        self._ids = {text: token for token, text in reversed(list(enumerate(texts))) if text}
        lengths = defaultdict[int, set[int]](set)
        for token in self._ids:
            lengths[token[0]].add(len(token))
        # Lengths of the tokens that begin with a byte, the longest first.
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}

    def spell(self, text: bytes) -> list[int]:
        """Return the ids of the longest tokens, from the first on; none if there is no such token.

        Of equal tokens the one with the lowest id is taken.
        """
        ids = list[int]()
        start = 0
        while start < len(text):
            token = self._longest(text, start)
            if not token:
                return []
            ids.append(self._ids[token])
            start += len(token)
        return ids

    def _longest(self, text: bytes, start: int) -> bytes:
        lengths = self._lengths.get(text[start], ())
        pieces = (text[start : start + length] for length in lengths)
        return next((piece for piece in pieces if piece in self._ids), b"")
