"""Encodes text that a chat template wrote, with the tokenizers library."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    def _named(self) -> list[tuple[NamedToken, bool]]:
        """Tokens with names, and whether a name is looked for in normalized text."""
        found = self._library.get_added_tokens_decoder().items()
        return [
            (
                NamedToken(token.content, id, token.lstrip, token.rstrip, token.single_word),
                token.normalized and self._normalizer is not None,
            )
            for id, token in found
            if len(token.content) > 1
        ]

    @cached_property
    def _splitter(self) -> NameSplitter:
        return NameSplitter(token for token, normalized in self._named if not normalized)

    @cached_property
    def _names_of_forms(self) -> dict[str, str]:
        """Names of tokens by their normalized form, in which they are found."""
        tokens = (token for token, normalized in self._named if normalized)
        return {self._normalizer.normalize_str(token.name): token.name for token in tokens}

    @cached_property
    def _normalized_splitter(self) -> NameSplitter:
        tokens = {token.name: token for token, normalized in self._named if normalized}
        return NameSplitter(
            replace(tokens[name], name=form) for form, name in self._names_of_forms.items() if form
        )

    def _encode_between(self, part: str, opening: bool) -> list[int]:
        """Encode text between the names that are found as they are."""
        if not self._normalized_splitter:
            return self.encode_part(part, opening)
        text = tokenizers.NormalizedString(part)
        self._normalizer.normalize(text)

        def is_written(found: re.Match[str]) -> bool:
            written = text[found.start() : found.end()]
            name = self._names_of_forms[found[0]]
            return written is not None and name.casefold() in written.original.casefold()

        names = self._normalized_splitter
        if not any(map(is_written, names.found(text.normalized))):
            return self.encode_part(part, opening)
        return names.encode(
            text.normalized,
            lambda inner, first: self._without_names(
                self._normalized_plain, inner, opening and first
            ),
            is_written,
        )

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


def _with_mark_alone(library: tokenizers.Tokenizer, changed: dict) -> tokenizers.Tokenizer:
    """Return a copy of a tokenizer with MARK as its only added token.

    Text that follows MARK does not open a text, so that it gets no dummy space.
    """
    fields = json.loads(library.to_str()) | {"added_tokens": []} | changed
    copy = tokenizers.Tokenizer.from_str(json.dumps(fields))
    copy.add_tokens([tokenizers.AddedToken(MARK, normalized=False)])
    return copy
