"""Marks in clients' strings that keep the names of tokens there from becoming tokens."""

import re
import unicodedata
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

from jaxserve.tokenizer import MARK
from jaxserve.tokenizer.special import any_of


class Marker:
    """Puts MARK wherever a client's string could become the name of a token.

    - A name inside of a string gets a mark inside, in upper and lower case alike.
    - A string that is a piece of a name gets a mark inside: the role "end" where the template
      writes '<|' + role + '|>' and the tokenizer has <|end|>. The template's own words are
      excepted: "text" is a piece of <|endoftext|>.
    - A string that begins or ends with a piece of a name gets a mark there. Pieces, too, count in
      upper and lower case alike, and with and without the white space around the string.
    - A string that begins with a combining letter gets a mark before it: the letter cannot change
      what the template wrote. So does what follows a letter of which a filter makes two.

    Marks cannot help against a template that removes characters from the middle of a string, cuts
    it into words, or inserts characters there. Numbers, true and false have no inside to mark.
    """

    def __init__(
        self, names: Iterable[str], words: Iterable[str], keys: Iterable[str] = ()
    ) -> None:
        """Prepare to mark strings.

        `names` are those of the tokens that a rendered text may hold; a name of one character has
        no inside to mark and stays. `words` are strings that the template compares or looks up, and
        that must reach it unchanged; `keys` are others that it looks up as keys of objects.
        """
        names = [name for name in sorted(names, key=len, reverse=True) if len(name) > 1]
        self._inside = re.compile(any_of(names), re.IGNORECASE)
        lower = [lowered(name) for name in names]  # tokenizers may take capitals for small letters
        self._all_names = MARK.join(lower)
        self._heads = frozenset(name[:size] for name in lower for size in range(1, len(name)))
        self._tails = frozenset(name[size:] for name in lower for size in range(1, len(name)))
        self._longest = len(names[0]) if names else 0
        self._words = frozenset(words)
        self._keys = self._words.union(keys)

    def marked(self, value: Any) -> Any:
        """Return a copy of a plain value with marks, in keys of objects too."""
        if isinstance(value, str):
            return self._text(value, self._words)
        if isinstance(value, dict):
            return {self._text(key, self._keys): self.marked(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.marked(inner) for inner in value]
        return value

    def _text(self, text: str, words: Collection[str]) -> str:
        """Return a string with marks inside and at both ends, as far as they are needed.

        Strings that the template itself has must stay what they are, but for names in them.
        """
        if text in words:
            return self._broken(text if text.isalnum() else self._closed(text))
        core = text.strip()
        begin = text.index(core)
        inner = self._closed(_break(core) if self._is_piece(core) else core, core)
        whole = text[:begin] + inner + text[begin + len(core) :]
        whole = self._closed(_break(whole) if self._is_piece(text) else whole, text)
        if not text.isascii():
            whole = _expanding().sub(lambda found: found[0] + MARK, whole)
        return self._broken(whole)

    def _closed(self, text: str, plain: str | None = None) -> str:
        """Return a text with marks at the ends where `plain`, without marks inside, needs them."""
        plain = text if plain is None else plain
        if self._begins(plain):
            text = MARK + text
        if self._ends(plain):
            text += MARK
        return text

    def _is_piece(self, text: str) -> bool:
        return bool(text) and lowered(text) in self._all_names

    def _begins(self, text: str) -> bool:
        """Return whether the beginning of a string could complete what stands before it."""
        if text and unicodedata.category(text[0])[0] == "M":
            return True
        first = lowered(text[: self._longest])
        return any(first[:size] in self._tails for size in range(1, len(first) + 1))

    def _ends(self, text: str) -> bool:
        """Return whether the end of a string could begin what is completed behind it."""
        last = lowered(text[-self._longest :]) if self._longest else ""
        return any(last[-size:] in self._heads for size in range(1, len(last) + 1))

    def _broken(self, text: str) -> str:
        """Return a string with a mark inside of every name."""
        while self._inside.search(text):  # more than once, as names may overlap
            text = self._inside.sub(lambda found: _break(found[0]), text)
        return text


@cache
def _expanding() -> re.Pattern[str]:
    """Return a pattern of the letters of which a filter such as `upper` makes more than one.

    The first is the German sharp s, the last an Armenian ligature.
    """
    letters = map(chr, range(0xDF, 0xFB18))
    return re.compile(f"[{''.join(letter for letter in letters if _expands(letter))}]")


def _expands(letter: str) -> bool:
    return max(len(letter.upper()), len(letter.lower()), len(letter.title())) > 1


def lowered(text: str) -> str:
    """Return a text in small letters, each by itself."""
    return text.lower() if text.isascii() else "".join(letter.lower() for letter in text)


def _break(name: str) -> str:
    return name[:1] + MARK + name[1:]
