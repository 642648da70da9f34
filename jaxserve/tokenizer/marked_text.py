"""Encodes text that a chat template wrote, with the tokenizers library."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property

import tokenizers

from jaxserve.tokenizer.protocol import MARK
from jaxserve.tokenizer.special import NamedToken, NameSplitter


class MarkedTextEncoder:
    """Encoder of texts in which MARK keeps a name from becoming its token.

    The library finds names in two passes, and so does this: those of tokens that are not normalized
    in the text as it is, the others in the normalized text between them. A name of the second kind
    must stand in the text as such, in upper or lower case: nobody can write one with letters that
    only normalization makes equal. Names of one letter are always text: they cannot have a mark
    inside that would make them so.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, check_text: Callable[[Sequence[int]], None]
    ) -> None:
        """Create an encoder; check_text raises TokenizerError for ids that are no text."""
        self._library = library
        self._check_text = check_text
        self._normalizer = library.normalizer

    def encode(self, text: str) -> list[int]:
        return self._splitter.encode(text, self._encode_between)

    def encode_part(self, part: str, opening: bool) -> list[int]:
        """Encode text in which no name is a token; every MARK is removed.

        opening: the text opens a text, so that the tokenizer may put a dummy space before it.
        """
        return self._without_names(self._plain, part, opening)

    @cached_property
    def _added(self) -> list[tuple[int, tokenizers.AddedToken]]:
        tokens = self._library.get_added_tokens_decoder().items()
        return [(id, token) for id, token in tokens if len(token.content) > 1]

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
            return self.encode_part(part, opening)
        return names.encode(
            form,
            lambda inner, first: self._without_names(
                self._normalized_plain, inner, opening and first
            ),
            written.__contains__,
        )

    def _written(self, part: str) -> set[int]:
        """Return where names stand in the normalized text that stand in the text itself, too."""
        text = tokenizers.NormalizedString(part)
        self._normalizer.normalize(text)
        pattern = "|".join(
            "".join(f"\\x{{{ord(letter):X}}}" for letter in form)
            for form in sorted(self._normalized_splitter.names, key=len, reverse=True)
        )
        places = set[int]()
        start = 0
        for piece in text.split(tokenizers.Regex(pattern), "isolated"):
            name = self._names_of_forms.get(piece.normalized)
            if name is not None and name.lower() in piece.original.lower():
                places.add(start)
            start += len(piece.normalized)
        return places

    def _without_names(self, plain: tokenizers.Tokenizer, part: str, opening: bool) -> list[int]:
        text = part.replace(MARK, "")
        if not text:
            return []
        if opening:
            ids = plain.encode(text, add_special_tokens=False).ids
        else:
            ids = plain.encode(MARK + text, add_special_tokens=False).ids[1:]
        self._check_text(ids)
        return ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        return _with_mark_alone(self._library, {})

    @cached_property
    def _normalized_plain(self) -> tokenizers.Tokenizer:
        """The tokenizer of text that is normalized already."""
        return _with_mark_alone(self._library, {"normalizer": None})


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
