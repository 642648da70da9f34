"""Finds names of tokens in a text, where they stand for the tokens."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from jaxserve.tokenizer.protocol import TokenizerError

# Unicode's White_Space, which the tokenizers library strips. str.strip takes four more characters.
WHITE_SPACE: Final = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000"
)
NO_WORD: Final = re.compile(r"[^\w\s]")  # in names of marks, and not in words or white space
JOINERS: Final = "\u200c\u200d"
NEVER: Final = "(?!)"
MAX_NESTING: Final = 40  # of groups in a pattern


@dataclass(frozen=True)
class NamedToken:
    """A token that is found by its name."""

    name: str
    id: int
    left: bool = False  # the token swallows white space on its left
    right: bool = False  # the token swallows white space on its right
    whole_word: bool = False  # the token is not found inside a word


class NameSplitter:
    """Splits a text at names of tokens as the libraries do: leftmost first, then longest."""

    def __init__(self, tokens: Iterable[NamedToken]) -> None:
        self._tokens = {token.name: token for token in tokens if token.name}
        self._names = re.compile(any_of(self._tokens))

    def __bool__(self) -> bool:
        """Return whether there is any name to find."""
        return bool(self._tokens)

    @property
    def names(self) -> Iterable[str]:
        return self._tokens.keys()

    def found(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the places of names in a text.

        A name inside a word hides shorter ones at its place also where it does not count.
        """
        for found in self._names.finditer(text):
            if not self._tokens[found[0]].whole_word or _stands_alone(text, found):
                yield found

    def encode(
        self,
        text: str,
        encode_part: Callable[[str, bool], list[int]],
        accept: Callable[[int], bool] = lambda start: True,
    ) -> list[int]:
        """Encode a text, names as their tokens and the parts between names with `encode_part`.

        Args:
            encode_part: Function called with a part, and whether the part is at the beginning of
                the text.
            accept: Function called with the place of a name that was found, which returns whether
                the name stands for its token.
        """
        ids = list[int]()
        start = 0
        after = None
        for found in self.found(text):
            if not accept(found.start()):
                continue
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


def require_text(ids: Iterable[int], named: Mapping[int, str]) -> None:
    """Raise TokenizerError for a text that the vocabulary spells by a token of its name."""
    for token_id in ids:
        if token_id in named:
            raise TokenizerError(
                f"text: holds {named[token_id]!r}, which this tokenizer cannot spell as plain "
                f"text; remove it"
            )


def any_of(names: Iterable[str], escape: Callable[[str], str] = re.escape) -> str:
    """Return a pattern that finds the longest of the names at a place.

    Names with a common beginning share it, so that thousands of them are tried as quickly as one.

    Args:
        escape: Function that makes a pattern of a text that stands for itself.
    """
    ordered = sorted(set(names))
    return _branches(ordered, 0, 0, escape) if ordered else NEVER


def _branches(names: list[str], depth: int, nesting: int, escape: Callable[[str], str]) -> str:
    """Return a pattern for what follows the first `depth` letters, which sorted names share.

    Args:
        nesting: Number of groups around the pattern.
    """
    if nesting > MAX_NESTING:
        longest_first = sorted((name[depth:] for name in names), key=len, reverse=True)
        return "|".join(map(escape, longest_first))
    common = _common(names[0], names[-1], depth)
    head = escape(names[0][depth:common])
    rest = names[1:] if len(names[0]) == common else names
    if not rest:
        return head
    groups = dict[str, list[str]]()
    for name in rest:
        groups.setdefault(name[common], []).append(name)
    branches = "|".join(_branches(group, common, nesting + 1, escape) for group in groups.values())
    return f"{head}(?:{branches}){'?' if len(rest) < len(names) else ''}"


def _common(first: str, last: str, depth: int) -> int:
    """Return how many letters the first and the last of sorted names share."""
    end = min(len(first), len(last))
    while depth < end and first[depth] == last[depth]:
        depth += 1
    return depth


def _stands_alone(text: str, found: re.Match[str]) -> bool:
    before = text[found.start() - 1 : found.start()] if found.start() else ""
    return not (_in_word(before) or _in_word(text[found.end() : found.end() + 1]))


def _in_word(letter: str) -> bool:
    """Return whether a letter is one of a word for the tokenizers library, whose \\w is Unicode's.

    Python's \\w lacks marks and joiners.
    """
    if not letter:
        return False
    category = unicodedata.category(letter)
    return category[0] in "LM" or category in ("Nd", "Nl", "Pc") or letter in JOINERS


def _trimmed(part: str, after: NamedToken | None, before: NamedToken | None) -> str:
    """Remove the white space that the tokens around a part swallow."""
    if after and after.right:
        part = part.lstrip(WHITE_SPACE)
    if before and before.left:
        part = part.rstrip(WHITE_SPACE)
    return part
