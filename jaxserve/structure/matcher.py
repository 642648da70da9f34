"""Interfaces through which the engine asks a grammar which tokens may come next."""

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    """Position of one text in its grammar; it advances token by token.

    A mask is ceil(vocab_size / 32) little-endian uint32 words; bit t % 32 of word t // 32 is set
    where token t may come. End tokens are set exactly where the text may end. Where the work for
    one token exceeds its bound, the matcher stops and `failure` says so.
    """

    def masks(self, drafted: Sequence[int] = ()) -> list[bytes]:
        """Return the mask of the next token, and one for the position after each drafted token.

        The list ends early at a drafted token that is not allowed, or that ends the text.
        """
        ...

    def fits(self, tokens: Sequence[int], free: bool = False) -> int:
        """Return how many of these tokens, from the first on, may come next.

        With `free`, count only up to the first token after which others are forced.
        """
        ...

    def accept(self, token: int) -> bool:
        """Advance by a token other than an end token, and return whether it was allowed.

        After a token that was not allowed the matcher cannot be used any more.
        """
        ...

    def forced(self) -> list[int]:
        """Return the tokens of the only text that the grammar allows next; often there are none.

        The tokens are the tokenizer's own spelling of that text, but for those that would spell
        another text.
        """
        ...

    @property
    def ended(self) -> bool:
        """Return whether the text is complete and nothing can follow."""
        ...

    @property
    def failure(self) -> str:
        """Reason in a few words why the text cannot be followed further; otherwise empty."""
        ...


class Grammar(Protocol):
    """Compiled grammar, from which every choice gets a matcher; for use from several threads."""

    def matcher(self) -> Matcher:
        """Return a new matcher at the beginning of a text."""
        ...
