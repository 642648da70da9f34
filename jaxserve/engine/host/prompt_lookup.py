"""Drafts from the sequence itself: the tokens behind an earlier occurrence of its newest ones.

The method is prompt lookup decoding (Saxena 2023).
"""

from typing import Final

from jaxserve.engine.host.sequence import Sequence
from jaxserve.request import Request

LENGTHS: Final = (4, 3, 2)  # newest tokens that are looked for, the longest first
INDEXED_TOKENS: Final = 2**12  # newest tokens of a prompt; to index them takes some milliseconds


class _Index:
    """End of the last occurrence of each run of tokens that another token follows."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.known = 0  # tokens that were indexed

    def extend(self, tokens: list[int]) -> None:
        """Add the runs that end before the newest token."""
        for end in range(max(self.known, len(tokens) - INDEXED_TOKENS, 1), len(tokens)):
            for length in LENGTHS:
                if end >= length:
                    self.ends[tuple(tokens[end - length : end])] = end
        self.known = max(len(tokens), 1)


class PromptLookup:
    """Proposer that drafts up to `max_drafts` tokens at a time from the sequence itself."""

    waits = True
    has_pages = False

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._indexes: dict[int, _Index] = {}

    def takes(self, request: Request) -> bool:
        """Return True: every output may repeat itself or its prompt."""
        return True

    def propose(self, seq: Sequence) -> list[int]:
        """Return the tokens behind the last occurrence of the longest run that occurred before."""
        index = self._indexes.setdefault(seq.id, _Index())
        index.extend(seq.tokens)
        for length in LENGTHS:
            if len(seq.tokens) <= length:
                continue
            end = index.ends.get(tuple(seq.tokens[-length:]))
            if end is not None:
                return seq.tokens[end : end + self._max_drafts]
        return []

    def forget(self, seq: Sequence) -> None:
        """Drop the index of a sequence that has ended."""
        self._indexes.pop(seq.id, None)
