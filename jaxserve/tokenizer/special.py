"""Finds names of tokens in text written by a chat template, where they stand for the tokens."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxserve.tokenizer.protocol import MARK


@dataclass(frozen=True)
class NamedToken:
    """A token that is found by its name.

    left, right: it swallows white space on that side. whole_word: it is not found inside a word.
    """

    name: str
    id: int
    left: bool = False
    right: bool = False
    whole_word: bool = False

    @property
    def pattern(self) -> str:
        name = re.escape(self.name)
        return rf"(?<!\w){name}(?!\w)" if self.whole_word else name


class NameSplitter:
    """Splits a text at names of tokens as the libraries do: leftmost first, then longest.

    Names of one letter are always text: they cannot have a mark inside that would make them so.
    """

    def __init__(self, tokens: Iterable[NamedToken]) -> None:
        named = sorted(
            (token for token in tokens if len(token.name) > 1), key=lambda token: -len(token.name)
        )
        self._tokens = {token.name: token for token in named}
        # The pattern has no groups: a thousand of them would make a search a thousand times slower.
        self._names = re.compile("|".join(token.pattern for token in named) or "(?!)")

    def encode(self, text: str, encode_part: Callable[[str, bool], list[int]]) -> list[int]:
        """Encode a text; encode_part(part, opening) encodes a part between names.

        opening: the part is at the beginning of the text.
        """
        ids = list[int]()
        start = 0
        after = None
        for found in self._names.finditer(text):
            before = self._tokens[found[0]]
            part = _trimmed(text[start : found.start()], after, before)
            if part:
                ids += encode_part(part, start == 0)
            ids.append(before.id)
            start = found.end()
            after = before
        part = _trimmed(text[start:], after, None)
        if part:
            ids += encode_part(part, start == 0)
        return ids


def _trimmed(part: str, after: NamedToken | None, before: NamedToken | None) -> str:
    """Remove the white space that the tokens around a part swallow; "" if only marks are left."""
    if after and after.right:
        part = part.lstrip()
    if before and before.left:
        part = part.rstrip()
    return part if part.replace(MARK, "") else ""
