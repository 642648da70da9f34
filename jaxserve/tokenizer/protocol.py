"""What the rest of the project asks of a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

MARK = "\ufdd0"  # a noncharacter of Unicode, for use inside of a program: see encode_special()


class TokenizerError(ValueError):
    """A tokenizer file, setting or text that cannot be used. The message is one line: what, why,
    and the fix.
    """


class Tokenizer(Protocol):
    """Ids lie in [0, vocab_size). An id outside that range (a model's padded vocabulary) decodes to
    nothing.

    The text of a sequence is the UTF-8 decoding of its tokens' bytes joined. An ill-formed sequence
    of bytes becomes U+FFFD, one for each maximal subpart (Unicode 16.0, section 3.9), whichever
    library encodes. SentencePiece itself writes one for each byte, and the tokenizers library one
    for each byte of the whole run of byte tokens, the well-formed ones included; on well-formed
    text all three agree.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, whether or not encode() adds it."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end tokens; a checkpoint's generation config may name more."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that are no text, by name: their names are not taken for them in a prompt."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens that are text, by the name that spells them whatever stands around it: encode()
        takes it for them.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of text, with BOS and EOS exactly as the checkpoint says; names of special tokens
        inside are text.

        Raises:
            TokenizerError: the text is not valid Unicode, or the vocabulary cannot spell a special
            token's name
                other than by that token.
        """
        ...

    def encode_special(self, text: str) -> list[int]:
        """Ids of text in which names of special tokens are those tokens, as a chat template writes
        them.

        Nothing is added at the ends. A name with MARK inside is text, one of an added token too;
        every MARK is taken out. What follows a special token does not open the text: it gets no
        dummy space, unless the tokenizer's files say so. All this is what transformers does with a
        rendered template.

        Raises:
            TokenizerError: as encode().
        """
        ...

    def encode_inner(self, text: str) -> list[int]:
        """Ids of text that goes on from another: nothing is added, no dummy space; names of special
        tokens are text.

        Raises:
            TokenizerError: as encode().
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The whole text of ids, without special tokens; a dummy space that encode() puts first is
        dropped.
        """
        ...

    def token_text(self, token_id: int) -> str:
        """One token for people to read: inside a text, special tokens by name, parts of characters
        as <0xNN>.
        """
        ...

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        """The bytes that a token adds to a text, none for a special token, and whether the text is
        still opening.

        opening says that no token so far has opened the text: some vocabularies write the first
        word with a dummy space before it, which belongs to the text only if something precedes it.
        """
        ...
