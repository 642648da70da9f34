"""Which tokens are drafted, and how many of them a step verifies.

A drafted token counts if it is the one that the model would have taken at its position anyway: the
noise of a position is fixed by seed, choice and position. So drafts change how many steps an output
takes, and never what it says.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from jaxserve.engine.host.sequence import Sequence as Seq
from jaxserve.engine.plan import DRAFTED
from jaxserve.request import Request

UNTRIED: Final = 0.5  # chance of a draft of which nothing is known
PRIOR: Final = 1.0  # drafted tokens that it counts as, beside those that were tried
FADING: Final = 0.95  # of what a sequence's earlier drafts count, with each draft
LONGEST_PAUSE: Final = 64  # tokens that a sequence goes on without drafts, at most


class Proposer(Protocol):
    """Drafts tokens: on the host, from what it has read so far, or by having the device do it.

    waits: its sequences wait until the host has read their newest token. has_pages: the device
    keeps pages for it, which have to be caught up with the sequence's before it drafts.
    """

    waits: bool
    has_pages: bool

    def takes(self, request: Request) -> bool:
        """Whether it may ever draft for this request."""
        ...

    def propose(self, seq: Seq) -> list[int]:
        """Tokens that may come after the sequence's newest one."""
        ...

    def forget(self, seq: Seq) -> None:
        """The sequence has ended."""
        ...


@dataclass
class DeviceDrafts:
    """The Proposer of what the device drafts itself, in the step that verifies it. most: tokens at
    a time.
    """

    most: int
    has_pages: bool
    waits: bool = False

    def takes(self, request: Request) -> bool:
        return (
            request.grammar is None
        )  # nobody knows what a grammar lets come behind drafts that are not made yet

    def propose(self, seq: Seq) -> list[int]:
        return [DRAFTED] * self.most

    def forget(self, seq: Seq) -> None:
        pass


@dataclass(frozen=True)
class Costs:
    """Seconds of steps that decode so many rows and verify so many drafted tokens of each; 0
    drafts: plain decodes.
    """

    seconds: Mapping[tuple[int, int], float]

    def of(self, rows: int, drafts: int) -> float:
        """Of the smallest step that holds them."""
        sizes = sorted(size for size, k in self.seconds if k == drafts)
        return self.seconds[sizes[min(bisect_left(sizes, rows), len(sizes) - 1)], drafts]


def expected(chance: float, drafts: int) -> float:
    """Tokens of a step that verifies so many drafts, each right with this chance if those before it
    are.

    Leviathan et al. 2023, equation 1.
    """
    return float(1 + drafts) if chance >= 1 else (1 - chance ** (1 + drafts)) / (1 - chance)


def most_tokens_per_second(
    costs: Costs, rows: int, plain: int, drafted: Sequence[tuple[float, int]]
) -> int:
    """How many drafts of a row to verify, 0 included; of equals, the fewest.

    rows: of the lane that has most. plain: rows without drafts. drafted: chance and number of each
    other row's drafts.
    """

    def rate(drafts: int) -> float:
        tokens = sum(expected(chance, min(count, drafts)) for chance, count in drafted)
        return (plain + tokens) / costs.of(rows, drafts)

    return max(sorted({drafts for _, drafts in costs.seconds}), key=rate)


@dataclass
class _Record:
    """Of one sequence: drafted tokens that were tried and that were right, fading; and when it
    drafts again.
    """

    tried: float = 0.0
    right: float = 0.0
    pause: int = 0  # tokens of the last one
    until: int = 0  # so many tokens it does not draft


@dataclass
class Speculation:
    """Drafts for the sequences of a step, as many as pay. costs: None until they are measured: then
    all are tried.
    """

    proposer: Proposer
    most: int
    costs: Costs | None = None
    verifications: int = 0  # of a sequence's drafts, in all
    drafted: int = 0  # tokens, in all
    accepted: int = 0
    _records: dict[int, _Record] = field(default_factory=dict)

    def enter(self, seq: Seq) -> None:
        """Its prompt needs nobody's drafts."""
        if self.proposer.takes(seq.request):
            self._records[seq.id] = _Record(until=seq.prompt_len + 1)

    def wake(self, seqs: Iterable[Seq], drafts: bool) -> None:
        """Let those wait for the host whose pause is over, where the proposer needs that and steps
        verify drafts.
        """
        for seq in seqs:
            if drafts:
                seq.waits_for_host |= self.proposer.waits and self.drafts(seq)
            elif seq.unread <= 1:  # with drafts in flight, the host does not know its length
                seq.waits_for_host = False

    def drafts(self, seq: Seq) -> bool:
        """Whether it drafts at all, and does not pause."""
        record = self._records.get(seq.id)
        return record is not None and seq.num_tokens >= record.until

    def draft(self, seqs: Iterable[Seq], rows: int, plain: int, most: int) -> dict[int, list[int]]:
        """Tokens to verify, at most so many of each, by sequence. rows, plain: as
        most_tokens_per_second has them.

        Who has none, or whose drafts do not pay, goes on for a while without any, and does not wait
        for the host.
        """
        found = {seq.id: self.proposer.propose(seq)[: min(self.most, most)] for seq in seqs}
        drafted = [(self._chance(id), len(tokens)) for id, tokens in found.items() if tokens]
        without = plain + len(found) - len(drafted)
        count = self.most
        if self.costs and drafted:
            count = most_tokens_per_second(self.costs, rows, without, drafted)
        for seq in seqs:
            self._pause(seq, bool(found[seq.id]) and count > 0)
        return {id: tokens[:count] for id, tokens in found.items() if tokens[:count]}

    def learn(self, seq: Seq, drafted: int, accepted: int) -> None:
        self.verifications += 1
        self.drafted += drafted
        self.accepted += accepted
        seq.times.verifications += 1
        seq.times.drafted += drafted
        seq.times.accepted += accepted
        if record := self._records.get(seq.id):
            record.tried = FADING * record.tried + min(accepted + 1, drafted)
            record.right = FADING * record.right + accepted

    def leave(self, seq: Seq) -> None:
        if self._records.pop(seq.id, None):
            self.proposer.forget(seq)

    def _chance(self, id: int) -> float:
        """That a drafted token is right: the sequence's own record."""
        record = self._records[id]
        return (record.right + PRIOR * UNTRIED) / (record.tried + PRIOR)

    def _pause(self, seq: Seq, pays: bool) -> None:
        record = self._records[seq.id]
        record.pause = 0 if pays else min(2 * record.pause + 1, LONGEST_PAUSE)
        if record.pause == LONGEST_PAUSE:  # what it knows will be old: it tries again
            record.tried = record.right = 0.0
        if record.pause > 1:
            record.until, seq.waits_for_host = seq.num_tokens + record.pause, False
