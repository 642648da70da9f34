"""What one choice may still say: its grammar, and the tokens that the client allows besides."""

from collections.abc import Sequence

from jaxserve.engine.events import Finish, FinishReason
from jaxserve.errors import GrammarError
from jaxserve.request import SamplingParams
from jaxserve.structure.matcher import Matcher


class Constraint:
    """Follows the tokens of a choice, one behind another; the mask of the next one is always at
    hand.
    """

    def __init__(self, matcher: Matcher, params: SamplingParams) -> None:
        """GrammarError where no token can begin."""
        penalised = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        # Penalties count on the device what it sampled, and forced tokens have no log-probability.
        self.forces = params.logprobs is None and params.allowed_token_ids is None and not penalised
        self._matcher = matcher
        self._field = params.structure.field if params.structure else "structure"
        self._allowed = (
            None if params.allowed_token_ids is None else _bits(params.allowed_token_ids)
        )
        self._count = 0
        self._mask = self._next_mask()
        if error := self._dead_end():
            raise error

    def take(self, token: int) -> Finish | None:
        """Go on by a token that ends nothing by itself; how the choice ends if the grammar ends
        it."""
        self._count += 1
        if not self._matcher.accept(token):
            return self._failed(f"token {token} may not come here")
        if self._matcher.ended:
            return Finish(FinishReason.STOP)
        self._mask = self._next_mask()
        error = self._dead_end()
        return Finish(FinishReason.ERROR, error=error) if error else None

    def forced(self) -> list[int]:
        """Tokens that come next whatever the model says; none where each has to be sampled."""
        return self._matcher.forced() if self.forces else []

    def fits(self, drafted: Sequence[int]) -> int:
        """How many drafted tokens, from the first on, the grammar lets come.

        None behind which tokens are forced: there nothing is sampled without drafts, and drafts
        change no token.
        """
        return self._matcher.fits(drafted, free=self.forces)

    def masks(self, drafted: Sequence[int]) -> bytes:
        """Of the next token, and of those behind each drafted one, one after the other.

        Fewer where a drafted token ends the text.
        """
        if not drafted:
            return self._mask
        return b"".join(map(self._within, self._matcher.masks(drafted)))

    def _next_mask(self) -> bytes:
        return self._within(self._matcher.masks()[0])

    def _within(self, mask: bytes) -> bytes:
        """Without the tokens that the client does not allow."""
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

    def _failed(self, why: str) -> Finish:
        return Finish(FinishReason.ERROR, error=self._error(self._matcher.failure or why))

    def _error(self, problem: str) -> GrammarError:
        return GrammarError(
            self._field, f"cannot be followed beyond {self._count} tokens: {problem}"
        )


def _bits(tokens: Sequence[int]) -> int:
    """Bit t is set for token t."""
    bits = bytearray(max(tokens) // 8 + 1)
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return int.from_bytes(bits, "little")
