"""Encodes text that a chat template wrote, with the tokenizers library."""

import json
from collections.abc import Mapping
from functools import cached_property

import tokenizers

from jaxserve.tokenizer.library_text import encoded
from jaxserve.tokenizer.protocol import MARK
from jaxserve.tokenizer.special import NO_WORD, NamedToken, NameSplitter, any_of, require_text


class MarkedTextEncoder:
    """Encoder of texts in which MARK keeps a name from becoming its token.

    The library finds names in two passes, and so does this: those of tokens that are not normalized
    in the text as it is, the others in the normalized text between them. A name of the second kind
    must stand in the text as such, in upper or lower case: nobody can write one with letters that
    only normalization makes equal. Names of one letter are always text: they cannot have a mark
    inside that would make them so.

    Args:
        added: Tokens that are found by their names.
        special: Names of tokens that no text may become.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        added: Mapping[int, tokenizers.AddedToken],
        special: Mapping[int, str],
    ) -> None:
        self._library = library
        self._added = [(id, token) for id, token in added.items() if len(token.content) > 1]
        self._special = special
        self._normalizer = library.normalizer

    def encode(self, text: str) -> list[int]:
        return self._splitter.encode(text, self._encode_between)

    def encode_part(self, part: str, opening: bool) -> list[int]:
        """Encode text in which no name is a token; every MARK is removed.

        Args:
            opening: Whether the part opens a text, so that the tokenizer may put a dummy space
                before the part.

        Raises:
            TokenizerError: The vocabulary spells the name of a special token by the token.
        """
        ids = _plain_ids(self._plain, part.replace(MARK, ""), opening)
        require_text(ids, self._special)
        return ids

    @cached_property
    def _splitter(self) -> NameSplitter:
        return NameSplitter(
            _named(token.content, id, token) for id, token in self._added if not token.normalized
        )

    @cached_property
    def _names_of_forms(self) -> dict[str, str]:
        """Names of tokens by their normalized form, in which they are found."""
        return {
            self._form(token.content): token.content for _, token in self._added if token.normalized
        }

    @cached_property
    def _normalized_splitter(self) -> NameSplitter:
        tokens = {token.content: (id, token) for id, token in self._added}
        return NameSplitter(
            _named(form, *tokens[name]) for form, name in self._names_of_forms.items()
        )

    def _form(self, text: str) -> str:
        return self._normalizer.normalize_str(text) if self._normalizer else text

    def _encode_between(self, part: str, opening: bool) -> list[int]:
        """Encode text between the names that are found as they are."""
        names = self._normalized_splitter
        form = self._form(part) if names else part
        written = {found.start() for found in names.found(form)}
        if form != part and written:
            written &= self._written(part)
        if not written:
            return self._without_names(self._plain, part, opening)
        return names.encode(
            form,
            lambda inner, first: self._without_names(
                self._normalized_plain, inner, opening and first
            ),
            written.__contains__,
        )

    @cached_property
    def _written_names(self) -> tokenizers.Regex:
        return tokenizers.Regex(any_of(self._normalized_splitter.names, _by_numbers))

    def _written(self, part: str) -> set[int]:
        """Return where names stand in the normalized text that stand in the text itself, too."""
        text = tokenizers.NormalizedString(part)
        self._normalizer.normalize(text)
        places = set[int]()
        start = 0
        for piece in text.split(self._written_names, "isolated"):
            name = self._names_of_forms.get(piece.normalized)
            if name is not None and name.lower() in piece.original.lower():
                places.add(start)
            start += len(piece.normalized)
        return places

    def _without_names(self, plain: tokenizers.Tokenizer, part: str, opening: bool) -> list[int]:
        """Encode text between names, which the vocabulary must not spell by their tokens.

        Where it would, the text is cut at the marks.
        """
        ids = _plain_ids(plain, part.replace(MARK, ""), opening)
        if self._guarded.keys().isdisjoint(ids):
            return ids
        first, *others = part.split(MARK)
        ids = _plain_ids(plain, first, opening)
        for other in others:
            ids += _plain_ids(plain, other, False)
        require_text(ids, self._guarded)
        return ids

    @cached_property
    def _guarded(self) -> dict[int, str]:
        """Names of tokens that are found in text, but for those of words and white space."""
        text = [(id, token.content) for id, token in self._added if not token.special]
        marks = {id: name for id, name in text if NO_WORD.search(name)}
        return {**marks, **self._special}

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        return _with_mark_alone(self._library, {})

    @cached_property
    def _normalized_plain(self) -> tokenizers.Tokenizer:
        """The tokenizer of text that is normalized already."""
        return _with_mark_alone(self._library, {"normalizer": None})


def _by_numbers(text: str) -> str:
    """Return a pattern of Oniguruma, the library's, that finds a text whatever its letters mean."""
    return "".join(f"\\x{{{ord(letter):X}}}" for letter in text)


def _named(name: str, id: int, token: tokenizers.AddedToken) -> NamedToken:
    return NamedToken(name, id, token.lstrip, token.rstrip, token.single_word)


def _with_mark_alone(library: tokenizers.Tokenizer, changed: dict) -> tokenizers.Tokenizer:
    """Return a copy of a tokenizer with MARK as its only added token.

    Text that follows MARK does not open a text, so that it gets no dummy space.
    """
    fields = json.loads(library.to_str()) | {"added_tokens": []} | changed
    copy = tokenizers.Tokenizer.from_str(json.dumps(fields))
    copy.add_tokens([tokenizers.AddedToken(MARK, normalized=False)])
    return copy


def _plain_ids(plain: tokenizers.Tokenizer, text: str, opening: bool) -> list[int]:
    if not text:
        return []
    if opening:
        return encoded(plain, text)
    return encoded(plain, MARK + text)[1:]
