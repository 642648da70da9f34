"""Policy of the engine: which tokens the next step computes, who enters, and who gives way.

There are no phases. In every sequence `num_computed` chases `num_tokens`, and a step hands out
chunks of what lies between. A decode is a chunk of 1 (of several where decodes are launched as
one, each feeding the next), a prompt is cut into chunks under the step's token budget, verifying k
drafted tokens is a chunk of 1 + k, a prefix hit begins further on, and a preempted sequence starts
over from what is still cached. Pages of a sequence that ended or was preempted come back when the
last step launched with it is committed.
"""

from collections.abc import Iterable

from jaxserve.config import EngineConfig
from jaxserve.engine.events import TokenEvent
from jaxserve.engine.host.commit import Committer
from jaxserve.engine.host.draft_planner import DraftPlanner
from jaxserve.engine.host.lane import FreshPage, Lane
from jaxserve.engine.host.multi_step import MultiStep
from jaxserve.engine.host.plan_builder import PlanBuilder, kind_of
from jaxserve.engine.host.queue import RequestQueue
from jaxserve.engine.host.rows import Rows
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.speculation import Speculation
from jaxserve.engine.host.waiting_choices import WaitingChoices
from jaxserve.engine.plan import StepKind, StepOutput, StepPlan
from jaxserve.engine.request_limits import max_new_tokens
from jaxserve.request import Request


class Scheduler:
    """Plans steps for the waiting and running sequences of all lanes.

    Plain Python: it reads no clock and holds no arrays. `now` is in monotonic seconds throughout.
    """

    def __init__(
        self, config: EngineConfig, *, fingerprint: str = "", speculation: Speculation | None = None
    ):
        self.config = config
        self.lanes = [Lane(i, config, fingerprint) for i in range(config.lanes)]
        self.preemptions = 0  # since the engine was built
        self.admitted: list[Sequence] = []  # by the last plan, those that had never had a row
        self.drafts = DraftPlanner(config, self.lanes, speculation)
        self.queue = RequestQueue(config, self.lanes, self.drafts)
        self._committer = Committer(config, self.lanes, self.queue, self.drafts)
        self.rows = Rows(config, self.lanes, self.queue.waiting)
        self.multi_step = MultiStep(config, self.lanes)
        self._steps = 0
        self._last_kind: StepKind = "decode"
        self._last_prompt_kind: StepKind = "score"  # of the last step that was not a decode

    # ---- Requests in, requests out

    @property
    def waiting(self) -> WaitingChoices:
        """Return the sequences without a row."""
        return self.queue.waiting

    @property
    def speculation(self) -> Speculation | None:
        """Return what drafts tokens, None if nothing does."""
        return self.drafts.speculation

    @speculation.setter
    def speculation(self, speculation: Speculation | None) -> None:
        self.drafts.speculation = speculation

    def submit(self, request: Request, seed: int, now: float = 0.0) -> None:
        """Queue the choices of a request; raise RequestError if it can never run."""
        self.queue.submit(request, seed, now)

    def max_tokens(self, request: Request, name: str = "prompt") -> int:
        """Return how many tokens each choice may generate, see request_limits.max_new_tokens."""
        return max_new_tokens(self.config, request, name)

    def abort(self, request_id: str, now: float = 0.0) -> list[TokenEvent]:
        """End every choice of the request; unknown ids (ended already) are no error."""
        return self.queue.abort(request_id, now)

    def expire(self, now: float) -> list[TokenEvent]:
        """End every choice that has not begun by its request's `start_by`."""
        return self.queue.expire(now)

    def stop(self, request_id: str, index: int, now: float = 0.0) -> TokenEvent | None:
        """End one choice whose text met a stop string; return None if it has ended already."""
        return self.queue.stop(request_id, index, now)

    def has(self, request_id: str) -> bool:
        """Return whether a choice of the request has not ended yet."""
        return request_id in self.queue.requests

    @property
    def has_work(self) -> bool:
        """Return whether a sequence waits, runs or has yet to give its pages back."""
        return bool(self.queue.sequences)

    # ---- Planning

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """Return the next step, or None when nothing can be launched."""
        self.admitted = []
        # Steps that verify drafted tokens have no prompts in them, so prompts go first.
        verifying = self.drafts.active and not self._prompts_due()
        self.drafts.wake(verifying)
        decodes = self.multi_step.decodes(bool(self.waiting), now)
        for only in self._turns():
            step = PlanBuilder(self.config, only, decodes)
            if verifying:
                self.drafts.plan(step, self._last_kind)
            outweighed: list[Sequence] = []
            if step.kind != "draft":
                for lane in self.lanes:
                    outweighed += self._continue_running(step, lane)
            if step.kind not in ("verify", "draft"):
                self._admit_waiting(step, now)
            step.reserved = [0] * len(self.lanes)
            self._schedule_each(step, outweighed)
            if step.scheduled:
                self._note(step, now)
                return step.build(self._steps)
        return None

    def _turns(self) -> tuple[StepKind | None, ...]:
        """Return the kinds of steps to try, in order; None is a mixed step.

        A deterministic engine computes each kind of chunk in steps of its own. There decodes and
        prompts take turns, and prompts to score take turns with the others.
        """
        if not self.config.deterministic or self.config.embeds:
            return (None,)
        prompts: tuple[StepKind, ...] = ("score", "prefill")
        if self._last_prompt_kind == "score":
            prompts = ("prefill", "score")
        return (*prompts, "decode") if self._last_kind == "decode" else ("decode", *prompts)

    def _note(self, step: PlanBuilder, now: float) -> None:
        """Remember the step that is about to be launched, for the turns and timing of the next."""
        self._steps += 1
        self.multi_step.note(step.steps, now)
        self._last_kind = step.kind
        if step.kind != "decode":
            self._last_prompt_kind = step.kind

    def _prompts_due(self) -> bool:
        """Return whether a prompt has a chunk to compute, in a row already or by an admission."""
        if any(seq.runnable and not seq.decoding for lane in self.lanes for seq in lane.running):
            return True
        first = next(self.rows.candidates(), None)
        if first is None:
            return False
        empty_step = PlanBuilder(self.config, None, 1)
        return self.rows.choose_lane(empty_step, first) is not None

    # ---- Running sequences

    def _continue_running(self, step: PlanBuilder, lane: Lane) -> list[Sequence]:
        """Add the next chunks of the lane's rows: decodes first, then prompts in rank order.

        Decodes go first since a long prompt must not hold up the streams. The one exception is a
        sequence that lacked pages in the step before: while nothing is scheduled yet, it may
        preempt every sequence behind it.

        Returns:
            Prompts that go on after much shorter ones of other clients, which half of the budget
            is for.
        """
        if lane.blocked is None and step.allows("decode") and lane.has_page_for_everyone():
            step.add_decodes(lane)
        wanting = [seq for seq in lane.running if step.wants(seq)]
        wanting.sort(key=lambda seq: (seq is not lane.blocked, not seq.decoding))
        first = [seq for seq in wanting if seq.decoding or seq is lane.blocked]
        prompts = wanting[len(first) :]
        lane.blocked = None
        decodes = {seq.id for seq in first if seq.decoding}
        step.reserved[lane.index] = len(decodes)
        for seq in first:
            if seq.id in decodes:
                step.reserved[lane.index] -= 1
            self._schedule_each(step, [seq])
        outweighed = self.rows.outweighed(prompts)
        if outweighed:
            step.reserved[lane.index] = (step.budgets[lane.index] + 1) // 2
        self._schedule_each(step, [seq for seq in prompts if seq not in outweighed])
        return outweighed

    def _schedule_each(self, step: PlanBuilder, seqs: Iterable[Sequence]) -> None:
        """Add the next chunks of running sequences, of those that are not preempted meanwhile."""
        for seq in seqs:
            if step.wants(seq):
                self._schedule(step, self.lanes[seq.lane], seq)

    def _schedule(self, step: PlanBuilder, lane: Lane, seq: Sequence) -> None:
        """Add the sequence's next chunk to the step, if budget and pages allow."""
        size = step.chunk_size(lane, seq)
        if size == 0:
            return
        fresh = self._make_room(step, lane, seq, seq.num_computed + size)
        if fresh is None:
            lane.blocked = self.rows.first_of([lane.blocked, seq]) if lane.blocked else seq
            return
        drafted = step.drafts_for(lane, seq, size)
        fresh_for_drafts = lane.extend(seq, seq.num_computed + size + len(drafted))
        if fresh_for_drafts is None:
            # Drafted tokens are not worth a preemption: go on without them.
            drafted = []
            fresh_for_drafts = []
        step.add_chunk(lane, seq, size, drafted, fresh + fresh_for_drafts)

    def _make_room(
        self, step: PlanBuilder, lane: Lane, seq: Sequence, tokens: int
    ) -> list[FreshPage] | None:
        """Return new pages for `tokens` positions, preempting sequences behind it if need be.

        None if the pages are not available in this step.
        """
        while (fresh := lane.extend(seq, tokens)) is None:
            if lane.draining:
                return None  # Pages come back with the step in flight: preempt no more for them.
            behind = self.rows.behind(seq, lane)
            victim = next((each for each in behind if each.id not in step.scheduled), None)
            if victim is None:
                return None
            self._preempt(victim)
        return fresh

    def _preempt(self, seq: Sequence) -> None:
        seq.preempted = True
        seq.times.preemptions += 1
        self.preemptions += 1
        self.queue.release_when_idle(seq)

    # ---- Waiting sequences

    def _admit_waiting(self, step: PlanBuilder, now: float) -> None:
        """Give rows to waiting sequences in turn, while the first of them finds room."""
        for seq in self.rows.candidates():
            found = self.rows.choose_lane(step, seq) if step.allows(kind_of(seq)) else None
            if found is None:
                for victim in self.rows.victims():
                    victim.gave_way = True
                    self._preempt(victim)
                return  # No sequence overtakes it: otherwise long prompts could wait for ever.
            lane, hit = found
            self.waiting.take(seq)
            seq.gave_way = False
            lane.enter(seq, hit)
            if not seq.times.admitted:
                seq.times.admitted = now
                seq.times.cached = seq.num_computed
                self.admitted.append(seq)
            if self.config.deterministic:
                # Whether pages run out depends on the load, so all of them are taken at once.
                lane.reserve(seq, seq.limit)
            step.admit(seq)
            self._schedule(step, lane, seq)

    # ---- After a step

    def commit(self, plan: StepPlan, output: StepOutput, now: float = 0.0) -> list[TokenEvent]:
        """Take in the output of a step and return what happened to its sequences.

        Tokens go to their sequences, full pages to the prefix cache, and idle pages to their pools.
        """
        return self._committer.commit(plan, output, now)

    def flush_cache(self) -> None:
        """Forget every cached page that no sequence holds."""
        for lane in self.lanes:
            for cache in lane.caches:
                cache.pool.drop_idle()

    def check_invariants(self) -> None:
        """Raise EngineError with the numbers when pages, rows or queues do not add up."""
        for lane in self.lanes:
            lane.check_invariants()
        self.queue.check_invariants()
