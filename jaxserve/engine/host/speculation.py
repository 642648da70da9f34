"""Which tokens are drafted, and how many of them a step verifies.

A drafted token is accepted if the model would have chosen it at its position anyway: the sampling
noise of a position is fixed by seed, choice and position. So drafts change how many steps an output
takes, and never its tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from jaxserve.engine.host.sequence import Sequence as Seq
from jaxserve.engine.plan import DRAFTED
from jaxserve.request import Request

UNTRIED_CHANCE: Final = 0.5  # that a drafted token is accepted, before any was tried
PRIOR_TOKENS: Final = 1.0  # tried tokens that UNTRIED_CHANCE weighs as much as
DECAY: Final = 0.95  # weight that a sequence's earlier drafts keep with each later one
LONGEST_PAUSE: Final = 64  # tokens that a sequence goes on without drafts, at most


class Proposer(Protocol):
    """Drafts tokens: on the host from the tokens read so far, or by having the device do it."""

    waits: bool  # sequences wait until the host has read their newest token
    # The device keeps pages for the proposer, which have to catch up with a sequence before it
    # drafts.
    has_pages: bool

    def takes(self, request: Request) -> bool:
        """Return whether tokens may ever be drafted for this request."""
        ...

    def propose(self, seq: Seq) -> list[int]:
        """Return tokens that may come behind the sequence's newest one."""
        ...

    def forget(self, seq: Seq) -> None:
        """Drop what is kept of a sequence that has ended."""
        ...


@dataclass
class DeviceDrafts:
    """Proposer of placeholders for tokens that the device drafts in the step that verifies them."""

    max_drafts: int  # of a row in a step
    has_pages: bool
    waits: bool = False

    def takes(self, request: Request) -> bool:
        """Return whether tokens may ever be drafted for this request."""
        # The masks behind drafted tokens depend on those tokens, which the host does not know when
        # it plans the step.
        return request.grammar is None

    def propose(self, seq: Seq) -> list[int]:
        """Return one placeholder for each token that the device may draft."""
        return [DRAFTED] * self.max_drafts

    def forget(self, seq: Seq) -> None:
        """Do nothing: nothing is kept."""


@dataclass(frozen=True)
class Costs:
    """Measured seconds of steps, by rows and by drafted tokens that are verified in each row.

    0 drafted tokens stand for plain decodes.
    """

    seconds: Mapping[tuple[int, int], float]

    def of(self, rows: int, drafts: int) -> float:
        """Return the seconds of the measured step that would run so many rows and drafts.

        Until a step's own size is compiled, that is a larger one.
        """
        kind = [(size, k) for size, k in self.seconds if k >= drafts and bool(k) == bool(drafts)]
        fitting = [key for key in kind if key[0] >= rows]
        return self.seconds[min(fitting) if fitting else max(kind)]


def expected_tokens(chance: float, drafts: int) -> float:
    """Return the tokens that a row is expected to gain by verifying `drafts` drafted tokens.

    The token behind the accepted ones counts as well (Leviathan et al. 2023, equation 1).

    Args:
        chance: Probability that a drafted token is accepted if those before it are.
    """
    if chance >= 1:
        return float(1 + drafts)
    return (1 - chance ** (1 + drafts)) / (1 - chance)


def best_draft_count(
    costs: Costs, rows: int, plain: int, drafted: Sequence[tuple[float, int]]
) -> int:
    """Return how many drafted tokens of a row give the most tokens per second when verified.

    0 is among the candidates; of equally good ones, the smallest wins.

    Args:
        rows: Number of rows of the lane that has most.
        plain: Number of rows without drafts.
        drafted: Chance and number of drafted tokens of each other row.
    """

    def rate(drafts: int) -> float:
        tokens = sum(expected_tokens(chance, min(count, drafts)) for chance, count in drafted)
        return (plain + tokens) / costs.of(rows, drafts)

    return max(sorted({drafts for _, drafts in costs.seconds}), key=rate)


@dataclass
class _Record:
    """Success of one sequence's drafts so far, and when the sequence drafts again."""

    tried: float = 0.0  # drafted tokens that were compared with the model's, decayed
    accepted: float = 0.0  # of those, decayed
    pause: int = 0  # length of the last pause, in tokens
    resumes_at: int = 0  # number of tokens from which on the sequence drafts


@dataclass
class Speculation:
    """Drafts tokens for the sequences of a step, as many as pay."""

    proposer: Proposer
    max_drafts: int  # of a row in a step
    costs: Costs | None = None  # None until measured; all drafted tokens are verified then
    verifications: int = 0  # counts each sequence of a step
    drafted: int = 0  # tokens that were verified
    accepted: int = 0  # of those, the tokens that the model would have chosen as well
    _records: dict[int, _Record] = field(default_factory=dict)

    def enter(self, seq: Seq) -> None:
        """Begin a record of a new sequence, if tokens may be drafted for it."""
        if self.proposer.takes(seq.request):
            # Prompts need no drafts: the first token of the output comes with the prompt.
            self._records[seq.id] = _Record(resumes_at=seq.prompt_len + 1)

    def wake(self, seqs: Iterable[Seq], verifying: bool) -> None:
        """Set for each running sequence whether it waits until the host has read its tokens.

        Sequences that may draft wait, if the proposer needs that and the next step may verify.
        """
        for seq in seqs:
            if verifying:
                if self.proposer.waits and self.may_draft(seq):
                    seq.waits_for_host = True
            elif seq.unread <= 1:
                # With drafted tokens in flight the host does not know the sequence's length, and
                # it has to go on waiting.
                seq.waits_for_host = False

    def may_draft(self, seq: Seq) -> bool:
        """Return whether tokens may be drafted for the sequence and it is not pausing."""
        record = self._records.get(seq.id)
        return record is not None and seq.num_tokens >= record.resumes_at

    def draft(self, seqs: Iterable[Seq], rows: int, plain: int, limit: int) -> dict[int, list[int]]:
        """Return tokens to verify by sequence id, at most `limit` of each, as many as pay.

        A sequence without any, or for which they do not pay, pauses and does not wait for the host
        meanwhile. `rows` and `plain` are as in best_draft_count.
        """
        limit = min(self.max_drafts, limit)
        found = {seq.id: self.proposer.propose(seq)[:limit] for seq in seqs}
        drafted = [(self._chance(id), len(tokens)) for id, tokens in found.items() if tokens]
        without = plain + len(found) - len(drafted)
        count = self.max_drafts
        if self.costs and drafted:
            count = best_draft_count(self.costs, rows, without, drafted)
        for seq in seqs:
            self._pause(seq, pays=bool(found[seq.id]) and count > 0)
        return {id: tokens[:count] for id, tokens in found.items() if tokens[:count]}

    def learn(self, seq: Seq, drafted: int, accepted: int) -> None:
        """Record how many of the sequence's drafted tokens were accepted."""
        self.verifications += 1
        self.drafted += drafted
        self.accepted += accepted
        seq.times.verifications += 1
        seq.times.drafted += drafted
        seq.times.accepted += accepted
        if record := self._records.get(seq.id):
            # Tokens behind the first rejected one were not tried: they had no chance.
            record.tried = DECAY * record.tried + min(accepted + 1, drafted)
            record.accepted = DECAY * record.accepted + accepted

    def leave(self, seq: Seq) -> None:
        """Forget a sequence that has ended."""
        if self._records.pop(seq.id, None):
            self.proposer.forget(seq)

    def _chance(self, id: int) -> float:
        """Return the probability that a drafted token is accepted, by the sequence's record."""
        record = self._records[id]
        accepted = record.accepted + PRIOR_TOKENS * UNTRIED_CHANCE
        return accepted / (record.tried + PRIOR_TOKENS)

    def _pause(self, seq: Seq, pays: bool) -> None:
        """Let a sequence whose drafts do not pay go on without any, longer each time."""
        record = self._records[seq.id]
        record.pause = 0 if pays else min(2 * record.pause + 1, LONGEST_PAUSE)
        if record.pause == LONGEST_PAUSE:
            # The record will be out of date after the pause: begin anew.
            record.tried = record.accepted = 0.0
        if record.pause > 1:
            record.resumes_at = seq.num_tokens + record.pause
            seq.waits_for_host = False
