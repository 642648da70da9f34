"""Finds names of tokens in a text, where they stand for the tokens."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

# White space of the tokenizers library (Unicode's White_Space). Python's \s has four control
# characters more.
SPACE: Final = r"[^\S\x1c-\x1f]"
LEADING: Final = re.compile(rf"\A{SPACE}+")
TRAILING: Final = re.compile(rf"{SPACE}+\Z")


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
    """Splits a text at names of tokens as the libraries do: leftmost first, then longest."""

    def __init__(self, tokens: Iterable[NamedToken]) -> None:
        named = sorted(tokens, key=lambda token: -len(token.name))
        self._tokens = {token.name: token for token in named}
        # The pattern has no groups: a thousand of them would make a search a thousand times slower.
        self._names = re.compile("|".join(token.pattern for token in named) or "(?!)")

    def __bool__(self) -> bool:
        """Return whether there is any name to find."""
        return bool(self._tokens)

    def found(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the places of names in a text."""
        return self._names.finditer(text)

    def encode(
        self,
        text: str,
        encode_part: Callable[[str, bool], list[int]],
        accept: Callable[[re.Match[str]], bool] = lambda found: True,
    ) -> list[int]:
        """Encode a text; encode_part(part, opening) encodes a part between names.

        opening: the part is at the beginning of the text. accept(found): whether a name that was
        found stands for its token.
        """
        ids = list[int]()
        start = 0
        after = None
        for found in filter(accept, self.found(text)):
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
    """Remove the white space that the tokens around a part swallow."""
    if after and after.right:
        part = LEADING.sub("", part)
    if before and before.left:
        part = TRAILING.sub("", part)
    return part
