"""Which tokens a step drafts and verifies, and when the draft model catches up."""

from collections.abc import Sequence as Seq

from jaxserve.config import EngineConfig
from jaxserve.engine.host.lane import Lane
from jaxserve.engine.host.plan_builder import PlanBuilder
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.speculation import Speculation
from jaxserve.engine.plan import StepKind


class DraftPlanner:
    """Plans speculation: every method does nothing where the engine drafts no tokens.

    Args:
        speculation: Proposer of tokens, which knows when they pay; None if nothing is drafted.
    """

    def __init__(self, config: EngineConfig, lanes: Seq[Lane], speculation: Speculation | None):
        self.speculation = speculation
        self._config = config
        self._lanes = lanes

    @property
    def active(self) -> bool:
        """Return whether steps may verify drafted tokens at all."""
        return self.speculation is not None and not self._config.deterministic

    def enter(self, seq: Sequence) -> None:
        """Note a new sequence."""
        if self.speculation:
            self.speculation.enter(seq)

    def leave(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        if self.speculation:
            self.speculation.leave(seq)

    def wake(self, verifying: bool) -> None:
        """Decide for every running sequence whether it waits until the host has read its tokens.

        Args:
            verifying: Whether the step to be planned may verify drafted tokens.
        """
        if self.speculation:
            running = (seq for lane in self._lanes for seq in lane.running)
            self.speculation.wake(running, verifying)

    def plan(self, step: PlanBuilder, last_kind: StepKind) -> None:
        """Choose the tokens that the step verifies, or make it a step of the draft model alone.

        Each row gets at most the number of drafted tokens for which the budget has room in all rows
        at once.
        """
        assert self.speculation
        decoding = [seq for lane in self._lanes for seq in lane.running if step.wants(seq)]
        drafting = [seq for seq in decoding if self.speculation.may_draft(seq)]
        rows = max(sum(seq.lane == lane.index for seq in decoding) for lane in self._lanes)
        limit = self._config.step_tokens // max(rows, 1) - 1
        plain = len(decoding) - len(drafting)
        step.drafted = self.speculation.draft(drafting, rows, plain, limit)
        if step.drafted:
            step.steps = 1
            if self.speculation.proposer.has_pages:
                self._catch_up(step, drafting, last_kind)

    def _catch_up(self, step: PlanBuilder, drafting: list[Sequence], last_kind: StepKind) -> None:
        """Plan a step of the draft model for sequences of which its pages lack tokens.

        Sequences that are behind draft nothing until they have caught up.
        """
        for seq in drafting:
            self._lanes[seq.lane].skip_drafted(seq)
        behind = [
            seq
            for seq in drafting
            if seq.id in step.drafted and seq.draft_computed < seq.num_computed
        ]
        # Never two such steps in a row: rows that stream have a step between them, so each token
        # waits for one chunk of the draft model at most.
        lacks_known = any(seq.draft_computed < seq.num_known for seq in behind)
        if last_kind != "draft" and lacks_known:
            step.kind = "draft"
            for lane in self._lanes:
                self._add_chunks(step, lane, [seq for seq in behind if seq.lane == lane.index])
        for seq in behind:
            del step.drafted[seq.id]

    def _add_chunks(self, step: PlanBuilder, lane: Lane, seqs: list[Sequence]) -> None:
        """Add the next chunk of each sequence, unless another one of the step shares its pages.

        No row of a step may read or write pages that another row writes. Sequences that share a
        prefix take turns; the later ones find the prefix done (see Lane.skip_drafted).
        """
        page_size = self._config.page_size
        touched = set[int]()
        written = set[int]()
        for seq in seqs:
            start = seq.draft_computed
            size = min(seq.num_known - start, step.budgets[lane.index])
            end = self._config.page_span(start + size)
            pages = seq.pages[self._config.full_group][:end]
            own = pages[start // page_size :]
            shared = not (written.isdisjoint(pages) and touched.isdisjoint(own))
            if size <= 0 or shared:
                continue
            touched.update(pages)
            written.update(own)
            step.add_draft_model_chunk(lane, seq, size)

    def learn(self, seq: Sequence, samples: int, taken: int) -> None:
        """Record how many drafted tokens were accepted, and drop the draft model's K/V of the rest.

        Args:
            samples: Number of tokens that the verification could have given.
            taken: Number of tokens that it gave, the one behind the accepted ones included.
        """
        assert self.speculation
        if self.speculation.proposer.has_pages:
            seq.draft_computed -= samples - taken
        if not seq.finish:
            self.speculation.learn(seq, samples - 1, max(taken - 1, 0))
