"""Rows: which waiting sequence gets the next row, in which lane, and who gives one up for it."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import islice

from jaxserve.config import EngineConfig
from jaxserve.engine.host.lane import Lane
from jaxserve.engine.host.plan_builder import PlanBuilder
from jaxserve.engine.host.row_shares import HEAVIER, RowShares
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.waiting_choices import WaitingChoices

LOOKED_AT = 4  # waiting sequences for each row that are looked at for who gives way


class Rows:
    """The rows of all lanes, and the clients that share them.

    While other clients wait, each may hold an even share of all rows, to whole rows and at least
    one, or the choices of one request. A client that waits alone may hold all rows; what it has
    above its share it gives up when a client comes that asks for far less.
    """

    def __init__(self, config: EngineConfig, lanes: Seq[Lane], waiting: WaitingChoices):
        self._config = config
        self._lanes = lanes
        self._waiting = waiting
        self._num_rows = config.max_batch * len(lanes)

    def _shares(self) -> RowShares:
        running = [seq for lane in self._lanes for seq in lane.running if not seq.leaving]
        return RowShares(running, self._waiting, self._num_rows)

    # ---- Who is next

    def candidates(self) -> Iterator[Sequence]:
        """Yield the waiting sequences to which a row could be given now, in their turns.

        They may be taken from the waiting ones meanwhile.
        """
        if not len(self._waiting):
            return
        shares = self._shares()
        has_row = any(lane.has_row for lane in self._lanes)
        if has_row or (shares.may_give_way and not self._config.deterministic):
            for seq, _ in self._in_turn(shares):
                yield seq

    def _in_turn(self, shares: RowShares) -> Iterator[tuple[Sequence, bool]]:
        return self._waiting.in_turn(shares.running, shares.share, self._is_ready)

    def _is_ready(self, seq: Sequence) -> bool:
        return not self.waits_for_leader(seq)

    def waits_for_leader(self, seq: Sequence) -> bool:
        """Return whether the choice waits for choice 0 to publish the pages of their prompt."""
        leader = seq.leader
        if leader is None or leader.finish or not self._config.shares_prompts:
            return False
        deterministic = self._config.deterministic
        unit = self._config.chunk_border if deterministic else self._config.page_size
        if seq.prompt_len <= unit:
            return False  # The prompt has no full page that could be shared.
        return leader.num_generated == 0 or leader.settled < leader.prompt_len

    # ---- Where it finds room

    def choose_lane(self, step: PlanBuilder, seq: Sequence) -> tuple[Lane, list[list[int]]] | None:
        """Return the lane for a waiting sequence, and the pages per group that it has cached there.

        Among the lanes that can take the sequence now, the longest cached prefix wins, then the
        most available pages. None if no lane can.
        """
        best: tuple[Lane, list[list[int]]] | None = None
        best_score = (-1, -1)
        for lane in self._lanes:
            if not lane.has_row or step.budgets[lane.index] == 0:
                continue
            hit = lane.hit(seq)
            cached_pages = len(hit[0])
            if not self._fits(lane, seq, hit) or step.chunk_size(lane, seq, cached_pages) == 0:
                continue
            score = (cached_pages, lane.available_pages())
            if score > best_score:
                best = lane, hit
                best_score = score
        return best

    def _fits(self, lane: Lane, seq: Sequence, hit: list[list[int]]) -> bool:
        """Return whether a lane with a free row has the pages for a waiting sequence."""
        positions = seq.limit if self._config.deterministic else len(seq.tokens) + 1
        return not lane.blocked and lane.fits(seq, hit, min(positions, self._config.capacity))

    # ---- Who gives way

    def outweighed(self, prompts: Seq[Sequence]) -> list[Sequence]:
        """Return the prompts in rows that much shorter ones of other clients do not wait for.

        These are in rows too, or the next that gets one. Deterministic engines compute prompts by
        arrival, as their chunks cannot be cut.
        """
        if self._config.deterministic or not prompts:
            return []
        first = next(self.candidates(), None)
        others = [*prompts, first] if first else prompts
        return [seq for seq in prompts if any(_is_light(other, seq) for other in others)]

    def behind(self, seq: Sequence, lane: Lane) -> list[Sequence]:
        """Return the running sequences of a lane that give it their pages, the first one first."""
        order = self._shares().precedence
        behind = [each for each in lane.running if order(each) > order(seq)]
        return sorted(behind, key=order, reverse=True)

    def first_of(self, seqs: Iterable[Sequence]) -> Sequence:
        """Return the sequence that precedes the others."""
        return min(seqs, key=self._shares().precedence)

    def victims(self) -> list[Sequence]:
        """Return the running sequences that give their rows, or their pages, to waiting ones.

        A deterministic engine takes no row back: what it has decoded it would compute again in
        steps of another kind, with other last bits.
        """
        if self._config.deterministic:
            return []
        shares = self._shares()
        first = next(self.candidates(), None)
        if first and shares.num_free and not self._will_have_room(first):
            return shares.victims([first], shares.above_in_pages)
        if not shares.may_give_way:
            return []
        within = [seq for seq, is_within in self._first_turns(shares) if is_within]
        return shares.victims(within[shares.num_free :], shares.above)

    def _first_turns(self, shares: RowShares) -> Iterator[tuple[Sequence, bool]]:
        return islice(self._in_turn(shares), LOOKED_AT * self._num_rows)

    def _will_have_room(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence lacks nothing that another one would have to give up.

        Pages may come back with the step in flight; or only the budget of this step was spent.
        """
        return any(
            lane.draining or (lane.has_row and self._fits(lane, seq, lane.hit(seq)))
            for lane in self._lanes
        )


def _is_light(other: Sequence, seq: Sequence) -> bool:
    """Return whether a prompt of another client has far less to compute."""
    is_other = other.request.client != seq.request.client
    return is_other and other.remaining * HEAVIER <= seq.remaining
