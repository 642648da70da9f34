"""Spells bytes with the tokens of a vocabulary."""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

LONG: Final = 256  # bytes of a text whose spelling is remembered
REMEMBERED: Final = 16  # texts


class Speller:
    """Vocabulary in which tokens are chosen by their bytes.

    An encoder may rewrite its text (Unicode normalization, lower case) or lack a letter. Where a
    text has to come out byte for byte, other tokens are taken instead.

    Args:
        texts: Bytes of each token by its id, b"" for one that spells none.
        left_out: Tokens that are not chosen, though an encoder may choose them.
    """

    def __init__(self, texts: Sequence[bytes], left_out: Collection[int] = ()) -> None:
        self._texts = texts
        # Of equal tokens the last is taken: the first are single bytes, which models seldom see.
        self._ids = {text: i for i, text in enumerate(texts) if text and i not in left_out}
        lengths = defaultdict[bytes, set[int]](set)
        for text in self._ids:
            lengths[text[:2]].add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}

    def mend(self, ids: Sequence[int], text: bytes) -> list[int]:
        """Return ids that spell a text, with as many of those given as spell its two ends.

        None are returned if no tokens spell the text.
        """
        head, start = self._beginning(ids, text)
        tail, end = self._ending(ids[head:], text[start:])
        between = text[start : start + end]
        middle = self.spell(between)
        if between and not middle:
            return self.spell(text)
        return [*ids[:head], *middle, *ids[head + tail :]]

    def spell(self, text: bytes) -> list[int]:
        """Return the fewest tokens that spell a text; none if there are no such tokens."""
        size = len(text)
        counts = [0] * (size + 1)  # of the tokens that spell the text from each place on
        pieces = [b""] * size  # the first of them; b"" where none do
        for start in reversed(range(size)):
            for length in self._lengths_at(text, start):
                end = start + length
                if end < size and not pieces[end]:
                    continue
                piece = text[start:end]
                fewer = not pieces[start] or counts[end] + 1 < counts[start]
                if fewer and piece in self._ids:
                    counts[start] = counts[end] + 1
                    pieces[start] = piece
        return self._path(pieces)

    def _lengths_at(self, text: bytes, start: int) -> list[int]:
        """Return the lengths of tokens that may stand at a place, the longest first."""
        first = text[start : start + 2]
        longer = self._lengths.get(first, []) if len(first) > 1 else []
        found = [*longer, *self._lengths.get(first[:1], [])]
        return [length for length in found if start + length <= len(text)]

    def _path(self, pieces: Sequence[bytes]) -> list[int]:
        ids = list[int]()
        start = 0
        while start < len(pieces):
            if not pieces[start]:
                return []
            ids.append(self._ids[pieces[start]])
            start += len(pieces[start])
        return ids

    def _beginning(self, ids: Sequence[int], text: bytes) -> tuple[int, int]:
        """Return how many ids spell the beginning of a text, and how many bytes that is."""
        start = 0
        for place, token in enumerate(ids):
            piece = self._texts[token]
            if not piece or not text.startswith(piece, start):
                return place, start
            start += len(piece)
        return len(ids), start

    def _ending(self, ids: Sequence[int], text: bytes) -> tuple[int, int]:
        """Return at which id the ids begin that spell the end of a text, and at which byte."""
        end = len(text)
        for place in reversed(range(len(ids))):
            piece = self._texts[ids[place]]
            if not piece or not text.endswith(piece, 0, end):
                return place + 1, end
            end -= len(piece)
        return 0, end


@dataclass(frozen=True)
class _Spelling:
    """Text and its ids."""

    text: bytes
    ids: Sequence[int]
    starts: Mapping[int, int]  # place among the ids by the byte at which the id's text begins


class RecentSpellings:
    """Spellings of long texts, for use from several threads.

    While a grammar forces a long text, its rest is asked for again behind every token.

    Args:
        texts: Bytes of each token by its id.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts
        self._lock = Lock()
        self._recent = deque[_Spelling](maxlen=REMEMBERED)

    def find(self, text: bytes) -> list[int] | None:
        """Return the ids of a text that ends one that was spelled before, or None."""
        if len(text) < LONG:
            return None
        with self._lock:
            for spelling in self._recent:
                start = len(spelling.text) - len(text)
                if start in spelling.starts and spelling.text.endswith(text):
                    return list(spelling.ids[spelling.starts[start] :])
        return None

    def add(self, text: bytes, ids: Sequence[int]) -> None:
        """Remember that these ids spell a text; the oldest is forgotten."""
        if len(text) < LONG or not ids:
            return
        starts = dict[int, int]()
        start = 0
        for place, token in enumerate(ids):
            starts[start] = place
            start += len(self._texts[token])
        with self._lock:
            self._recent.append(_Spelling(text, ids, starts))
