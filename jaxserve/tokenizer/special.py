"""Names of tokens inside a text that a chat template wrote: there they are the tokens."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxserve.tokenizer.protocol import MARK


@dataclass(frozen=True)
class NamedToken:
    """A token that its name spells. left, right: it swallows white space there; whole_word: not
    inside a word.

    A name of one letter cannot have a mark inside, so it is always text.
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
    """Cuts a text at names of tokens: the leftmost first, of several there the longest, as the
    libraries do.
    """

    def __init__(self, tokens: Iterable[NamedToken]) -> None:
        named = sorted(
            (token for token in tokens if len(token.name) > 1), key=lambda token: -len(token.name)
        )
        self._tokens = {token.name: token for token in named}
        # No groups: with one for each of a thousand names a search would be a thousand times
        # slower.
        self._names = re.compile("|".join(token.pattern for token in named) or "(?!)")

    def encode(self, text: str, encode_part: Callable[[str, bool], list[int]]) -> list[int]:
        """Ids of text; encode_part(part, opening) gives those of a part between names, opening for
        the first letter.
        """
        ids, start, after = [], 0, None
        for found in self._names.finditer(text):
            before = self._tokens[found[0]]
            part = _trimmed(text[start : found.start()], after, before)
            ids += [*(encode_part(part, start == 0) if part else ()), before.id]
            start, after = found.end(), before
        part = _trimmed(text[start:], after, None)
        return ids + (encode_part(part, start == 0) if part else [])


def _trimmed(part: str, after: NamedToken | None, before: NamedToken | None) -> str:
    """A part without the white space that the tokens around it swallow; nothing if it is marks
    alone.
    """
    if after and after.right:
        part = part.lstrip()
    if before and before.left:
        part = part.rstrip()
    return part if part.replace(MARK, "") else ""
