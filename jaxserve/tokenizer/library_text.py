"""Encodes text by the tokenizers library, whose panics become errors."""

import tokenizers

from jaxserve.tokenizer.protocol import TokenizerError


def encoded(library: tokenizers.Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, with nothing added at its ends.

    TokenizerError for a text on which the library's regular expressions give up, such as a word of
    millions of letters.
    """
    try:
        return library.encode(text, add_special_tokens=False).ids
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which is no Exception
            raise
        raise TokenizerError(
            f"text: a run of {len(text)} characters is too long for the tokenizer's pattern; put "
            "white space into it"
        ) from None
