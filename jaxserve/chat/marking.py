"""Marks in clients' strings that keep the names of tokens there from becoming tokens."""

import re
from collections.abc import Iterable
from typing import Any

from jaxserve.tokenizer import MARK
from jaxserve.tokenizer.special import any_of


class Marker:
    """Puts MARK wherever a client's string could become the name of a token.

    - A name inside of a string gets a mark inside, in upper and lower case alike.
    - A string that is a piece of a name gets a mark inside: the role "end" where the template
      writes '<|' + role + '|>' and the tokenizer has <|end|>. The template's own words are
      excepted: "text" is a piece of <|endoftext|>.
    - A string that begins or ends with a piece of a name gets a mark there, if the piece is more
      than letters and digits. Pieces, too, count in upper and lower case alike.

    Marks cannot help against a template that removes characters from the middle of a string, or
    inserts them there.
    """

    def __init__(self, names: Iterable[str], words: Iterable[str]) -> None:
        """Prepare to mark strings.

        `names` are those of the tokens that a rendered text may hold; a name of one character has
        no inside to mark and stays. `words` are strings that the template compares or looks up, and
        that must reach it unchanged.
        """
        names = [name for name in sorted(names, key=len, reverse=True) if len(name) > 1]
        self._inside = re.compile(any_of(names), re.IGNORECASE)
        lower = [name.lower() for name in names]  # a tokenizer may take capitals for small letters
        self._all_names = "\0".join(lower)
        self._heads = frozenset(name[:size] for name in lower for size in range(1, len(name)))
        self._tails = frozenset(name[size:] for name in lower for size in range(1, len(name)))
        self._longest = len(names[0]) if names else 0
        self._words = frozenset(words)

    def marked(self, value: Any) -> Any:
        """Return a copy of a plain value with marks; keys of objects get marks inside only."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self._broken(key): self.marked(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.marked(inner) for inner in value]
        return value

    def _text(self, text: str) -> str:
        """Return a string with marks inside and at both ends, as far as they are needed."""
        sizes = range(1, min(self._longest, len(text) + 1))
        first = text[: self._longest].lower()
        last = text[-self._longest :].lower()
        before = any(first[:size] in self._tails and not _is_word(first[:size]) for size in sizes)
        after = any(last[-size:] in self._heads and not _is_word(last[-size:]) for size in sizes)
        marked = self._broken(text)
        if before:
            marked = MARK + marked
        if after:
            marked += MARK
        return marked

    def _broken(self, text: str) -> str:
        """Return a string with a mark inside of every name, and of the string if it is a piece."""
        if text and text not in self._words and text.lower() in self._all_names:
            return _break(text)
        while self._inside.search(text):  # more than once, as names may overlap
            text = self._inside.sub(lambda found: _break(found[0]), text)
        return text


def _break(name: str) -> str:
    return name[:1] + MARK + name[1:]


def _is_word(text: str) -> bool:
    return re.fullmatch(r"\w*", text) is not None
