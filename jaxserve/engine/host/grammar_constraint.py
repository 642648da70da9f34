"""Constraint: which tokens may come next in a choice, by its grammar and its allowed tokens."""

from collections.abc import Sequence

from jaxserve.engine.events import Finish, FinishReason
from jaxserve.engine.row_fields import penalises
from jaxserve.errors import GrammarError
from jaxserve.sampling_params import SamplingParams
from jaxserve.structure.matcher import Matcher


class Constraint:
    """Follows the tokens of one choice and keeps the mask of the next token ready.

    A mask is a bit per token id, little-endian, set where the token may come.
    """

    def __init__(self, matcher: Matcher, params: SamplingParams) -> None:
        """Start at the beginning of the output; raise GrammarError if no token can come first."""
        allowed = params.allowed_token_ids
        # Forced tokens are not sampled: penalties would not count them on the device, they have no
        # log-probability, and allowed_token_ids might exclude them.
        self.forces = params.logprobs is None and allowed is None and not penalises(params)
        self._matcher = matcher
        self._field = params.structure.field if params.structure else "structure"
        self._allowed = None if allowed is None else _bits(allowed)
        self._count = 0
        self._mask = self._next_mask()
        if error := self._dead_end():
            raise error

    def take(self, token: int, last: bool = True) -> Finish | None:
        """Advance by a token that is not an end token; return how the choice ends, if it does.

        Args:
            last: Whether no token is known that follows, so that a mask is needed.
        """
        self._count += 1
        if not self._matcher.accept(token):
            problem = self._matcher.failure or f"token {token} may not come here"
            return Finish(FinishReason.ERROR, error=self._error(problem))
        if self._matcher.ended:
            return Finish(FinishReason.STOP)
        if not last:
            return None
        self._mask = self._next_mask()
        error = self._dead_end()
        return Finish(FinishReason.ERROR, error=error) if error else None

    def forced(self) -> list[int]:
        """Return the tokens that must come next; none if each token has to be sampled."""
        return self._matcher.forced() if self.forces else []

    def fits(self, drafted: Sequence[int]) -> int:
        """Return how many of the drafted tokens, from the first on, the grammar allows.

        Where tokens may be forced, the count stops before a token behind which others are forced:
        without drafts nothing would be sampled there, and drafts must not change any token.
        """
        return self._matcher.fits(drafted, free=self.forces)

    def masks(self, drafted: Sequence[int]) -> bytes:
        """Return the mask of the next token, and those behind each drafted one, concatenated.

        They are fewer if a drafted token ends the text.
        """
        if not drafted:
            return self._mask
        return b"".join(map(self._without_disallowed, self._matcher.masks(drafted)))

    def _next_mask(self) -> bytes:
        return self._without_disallowed(self._matcher.masks()[0])

    def _without_disallowed(self, mask: bytes) -> bytes:
        """Return the mask without the tokens that the client does not allow."""
        if self._allowed is None:
            return mask
        return (int.from_bytes(mask, "little") & self._allowed).to_bytes(len(mask), "little")

    def _dead_end(self) -> GrammarError | None:
        if self._matcher.failure:
            return self._error(self._matcher.failure)
        if self._mask == bytes(len(self._mask)):
            return self._error(
                "no token can follow (allowed_token_ids, or the vocabulary, leaves none)"
            )
        return None

    def _error(self, problem: str) -> GrammarError:
        return GrammarError(
            self._field, f"cannot be followed beyond {self._count} tokens: {problem}"
        )


def _bits(tokens: Sequence[int]) -> int:
    """Return the integer in which bit t is set for each token t."""
    bits = bytearray(max(tokens) // 8 + 1)
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return int.from_bytes(bits, "little")
