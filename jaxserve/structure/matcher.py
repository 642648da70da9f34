"""What the engine knows of a grammar: which tokens may come next."""

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    """Follows one text, token by token.

    A mask is as many little-endian uint32 words as the vocabulary needs; bit t % 32 of word t // 32
    is set where token t may come. End tokens may come exactly where the text may end. What a bound
    on the work of one token stops is `failure`.
    """

    def masks(self, drafted: Sequence[int] = ()) -> list[bytes]:
        """What may come next, and then behind each drafted token: fewer, behind one that may not
        come or ends it.
        """
        ...

    def fits(self, tokens: Sequence[int], free: bool = False) -> int:
        """How many of these tokens, from the first on, may come next; free: up to one behind which
        some are forced.
        """
        ...

    def accept(self, token: int) -> bool:
        """Go on by a token that is no end token; False, and the matcher is of no use any more, if
        it may not come.
        """
        ...

    def forced(self) -> list[int]:
        """Tokens that have to come next: the grammar leaves nothing else to say, and they are how
        it is spelled.
        """
        ...

    @property
    def ended(self) -> bool:
        """The text is whole and nothing can follow."""
        ...

    @property
    def failure(self) -> str:
        """Why no more can be said about the text, in a few words; empty while all is well."""
        ...


class Grammar(Protocol):
    """A compiled grammar, from which every choice has its own matcher. For use from several
    threads.
    """

    def matcher(self) -> Matcher:
        """At the beginning of a text."""
        ...
