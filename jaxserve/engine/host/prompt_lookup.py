"""Drafts from the sequence itself: what came after the last occurrence of its newest tokens (Saxena
2023).
"""

from typing import Final

from jaxserve.engine.host.sequence import Sequence
from jaxserve.request import Request

LENGTHS: Final = (4, 3, 2)  # newest tokens that are looked for, the longest first
SPAN: Final = (
    2**12
)  # newest tokens of a prompt that are remembered: to read them takes some milliseconds


class _Index:
    """Where each run of tokens was last followed by another."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.known = 0  # tokens whose runs are in it

    def extend(self, tokens: list[int]) -> None:
        """With the runs before the newest token."""
        for end in range(max(self.known, len(tokens) - SPAN, 1), len(tokens)):
            for length in LENGTHS:
                if end >= length:
                    self.ends[tuple(tokens[end - length : end])] = end
        self.known = max(len(tokens), 1)


class PromptLookup:
    """An engine.speculation.Proposer. most: tokens that it drafts at a time."""

    waits = True
    has_pages = False

    def __init__(self, most: int) -> None:
        self._most = most
        self._indexes: dict[int, _Index] = {}

    def takes(self, request: Request) -> bool:
        return True

    def propose(self, seq: Sequence) -> list[int]:
        index = self._indexes.setdefault(seq.id, _Index())
        index.extend(seq.tokens)
        for length in LENGTHS:
            end = index.ends.get(tuple(seq.tokens[-length:])) if len(seq.tokens) > length else None
            if end is not None:
                return seq.tokens[end : end + self._most]
        return []

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq.id, None)
