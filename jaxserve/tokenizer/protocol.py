"""The interface of tokenizers."""

from collections.abc import Mapping, Sequence
from typing import Protocol

MARK = "\ufdd0"  # a Unicode noncharacter, for use inside a program: see encode_special()


class TokenizerError(ValueError):
    """A tokenizer file, setting or text cannot be used; one line says what, why and the fix."""


class Tokenizer(Protocol):
    """Text to token ids and back.

    Ids lie in [0, vocab_size). An id outside that range, such as one of a model's padded
    vocabulary, decodes to nothing.

    The text of a sequence is the UTF-8 decoding of its tokens' joined bytes. Ill-formed bytes
    become U+FFFD, one for each maximal subpart (Unicode 16.0, section 3.9), whichever library
    encodes. SentencePiece itself writes one for each byte; the tokenizers library writes one for
    each byte of a run of byte tokens, including well-formed characters. On well-formed text all
    three agree.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None:
        """Token that begins a text, whether or not encode() adds it."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """End tokens of the tokenizer; a checkpoint's generation config may name more."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Control tokens by name, which decode to no text.

        encode() treats their names as text.
        """
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Added tokens by name, which decode to it.

        encode() takes the name for the token whatever stands around it.
        """
        ...

    @property
    def missing_tokens(self) -> Mapping[str, int]:
        """Tokens by name whose ids the model does not have; see load_tokenizer.

        Their names are text.
        """
        ...

    def token_id(self, name: str) -> int | None:
        """Return the id of the token of this name in the vocabulary, of any kind; None without."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, with BOS and EOS as the checkpoint says.

        Names of special tokens in the text are text.

        Args:
            add_special_tokens: False leaves BOS and EOS out.

        Raises:
            TokenizerError: The text is not valid Unicode, or the vocabulary cannot spell a special
                token's name other than by that token.
        """
        ...

    def encode_special(self, text: str) -> list[int]:
        """Encode a text in which names of special tokens are those tokens, as in chat templates.

        Nothing is added at the ends. A name with MARK inside is text, also that of an added token;
        every MARK is removed. Text after a special token does not open the text: it gets no dummy
        space unless the tokenizer's files say so. All this agrees with transformers' treatment of a
        rendered template.

        Raises:
            TokenizerError: As encode(), or the text holds the name of a missing token that is more
                than words or white space.
        """
        ...

    def encode_inner(self, text: str) -> list[int]:
        """Encode a text that continues another: without BOS, EOS or dummy space.

        Names of special tokens are text.

        Raises:
            TokenizerError: As encode().
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode a whole text, without special tokens and the dummy space that encode() adds."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return a token in readable form, as inside a text.

        Special tokens are named; bytes that are no whole character are written <0xNN>.
        """
        ...

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        """Return the bytes that a token adds to a text, and whether the text is still opening.

        Special tokens add none. Some vocabularies write the first word with a dummy space before
        it, which belongs to the text only if something precedes it.

        Args:
            opening: Whether no token so far has opened the text.
        """
        ...
