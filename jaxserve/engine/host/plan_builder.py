"""PlanBuilder: a step while it is being planned, with its token budget and its columns."""

from jaxserve.config import EngineConfig
from jaxserve.engine.host.lane import FreshPage, Lane
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.plan import FED_BACK, Admission, LanePlan, StepKind, StepPlan
from jaxserve.engine.row_fields import pack_row, penalises


def kind_of(seq: Sequence) -> StepKind:
    """Return the kind of step that the sequence's next chunk needs."""
    if seq.embeds:
        return "embed"
    if seq.decoding:
        return "decode"
    return "score" if seq.scoring else "prefill"


class PlanBuilder:
    """A step under construction: which chunks it has so far, and what its budget still allows.

    Adding a chunk writes its columns, charges the token budget of the lane and moves the sequence's
    counters on, since the step will be launched.

    Args:
        only: The one kind of chunk to plan; None for a mixed step.
        steps: The most decodes of a row.
    """

    def __init__(self, config: EngineConfig, only: StepKind | None, steps: int):
        self.kind: StepKind = "decode"  # until a chunk of another kind is added
        self.steps = steps
        self.lanes = tuple(LanePlan() for _ in range(config.lanes))
        self.admissions: list[Admission] = []
        self.scheduled: set[int] = set()  # ids of the sequences that have a chunk
        self.drafted: dict[int, list[int]] = {}  # tokens to verify, by sequence id
        self.budgets = [config.step_tokens] * config.lanes  # tokens left, by lane
        # Part of each lane's budget that decodes will take which are still to be scheduled: prompts
        # and drafted tokens leave it to them.
        self.reserved = [0] * config.lanes
        self._config = config
        self._only = only

    def allows(self, kind: StepKind) -> bool:
        """Return whether chunks of this kind may be added."""
        return self._only is None or self._only == kind

    def wants(self, seq: Sequence) -> bool:
        """Return whether the running sequence has a chunk for this step that is not in it yet."""
        return (
            seq.id not in self.scheduled
            and seq.row >= 0
            and seq.runnable
            and self.allows(kind_of(seq))
        )

    def chunk_size(self, lane: Lane, seq: Sequence, cached_pages: int = 0) -> int:
        """Return the tokens of the sequence's next chunk; 0 if the budget does not allow it.

        Args:
            cached_pages: Full pages that a waiting sequence will find in the lane's prefix cache.
        """
        budget = self.budgets[lane.index]
        if not seq.decoding:
            budget -= self.reserved[lane.index]
        start = seq.num_computed if seq.row >= 0 else cached_pages * self._config.page_size
        remaining = seq.num_tokens - start
        if seq.decoding:
            return min(remaining, budget)
        if not self._config.deterministic:
            return min(remaining, budget)
        # Deterministic chunks end at fixed borders, whatever else is in the step: a chunk that was
        # cut by the budget would be computed with other shapes, and its last bits would differ.
        border = self._config.chunk_border
        size = min(remaining, (start // border + 1) * border - start)
        return size if size <= budget else 0

    def drafts_for(self, lane: Lane, seq: Sequence, size: int) -> list[int]:
        """Return the drafted tokens to verify together with the newest one.

        Their number is bounded by the budget beside a chunk of `size` tokens, by the tokens that
        the sequence may still generate, and by its grammar.
        """
        # A sequence that was preempted in this step and admitted again starts with a prompt chunk.
        if not seq.decoding:
            return []
        spare = self.budgets[lane.index] - self.reserved[lane.index] - size
        limit = min(spare, seq.max_tokens - seq.num_generated - 1)
        drafted = self.drafted.get(seq.id, [])[: max(limit, 0)]
        if drafted and seq.constraint:
            return drafted[: seq.constraint.fits(drafted)]
        return drafted

    # ---- Adding to the step

    def admit(self, seq: Sequence) -> None:
        """Add what the device must know about a sequence that has just got a row."""
        self.admissions.append(admission_of(seq))

    def add_decodes(self, lane: Lane) -> None:
        """Add every plain decode of a lane at once; the lane must have pages for all of them.

        Most steps consist of nothing else, so this is the hottest path of the host: columns are
        written as whole lists, and sequences are not looked at twice.
        """
        seqs = [seq for seq in lane.running if seq.streaming and seq.id not in self.drafted]
        plan = self.lanes[lane.index]
        ids = [seq.id for seq in seqs]
        sizes = [1] * len(seqs)
        if self.steps > 1:
            sizes = [min(self.steps, seq.limit - seq.num_tokens) for seq in seqs]
        plan.sequences += ids
        plan.rows += [seq.row for seq in seqs]
        plan.starts += [seq.num_computed for seq in seqs]
        plan.sizes += sizes
        plan.samples += sizes
        plan.tokens += [FED_BACK] * sum(sizes)
        plan.targets += [0] * sum(sizes)
        for seq, size in zip(seqs, sizes, strict=True):
            if seq.num_computed + size > seq.room:
                plan.fresh += lane.must_extend(seq, seq.num_computed + size)
        plan.logprobs |= any(seq.request.params.logprobs is not None for seq in seqs)
        self.budgets[lane.index] -= len(seqs)
        self.scheduled.update(ids)
        for seq, size in zip(seqs, sizes, strict=True):
            seq.num_computed += size
            seq.in_flight += 1
            seq.unread += size

    def add_chunk(
        self, lane: Lane, seq: Sequence, size: int, drafted: list[int], fresh: list[FreshPage]
    ) -> None:
        """Add the sequence's next `size` tokens and the drafted ones behind them.

        Args:
            fresh: New pages for the chunk, as in LanePlan.
        """
        start = seq.num_computed
        total = size + len(drafted)
        reaches_end = start + size == seq.num_tokens
        samples = 1 + len(drafted) if reaches_end and not seq.embeds else 0
        self._note_kind(seq, drafted)
        known = [FED_BACK] if seq.decoding else seq.tokens[start : start + size]
        plan = self._add(lane, seq, start, total, samples)
        plan.tokens += known + drafted
        plan.targets += seq.tokens[start + 1 : start + size]
        plan.targets.append(0 if reaches_end else seq.tokens[start + size])
        plan.targets += drafted
        plan.fresh += fresh
        plan.logprobs |= seq.request.params.logprobs is not None
        if samples and seq.constraint:
            plan.masks.append((seq.row, seq.constraint.masks(drafted)))
        # A device that drafts writes the draft model's pages in the verify step itself.
        if drafted and seq.draft_computed == seq.num_computed:
            seq.draft_computed += total
        seq.num_computed += total
        seq.unread += samples
        if samples:
            seq.newest_on_device = True

    def _note_kind(self, seq: Sequence, drafted: list[int]) -> None:
        if not seq.decoding:
            # One prompt to score makes the whole step a score step, which computes other prompts
            # just as well.
            self.kind = "score" if self.kind == "score" else kind_of(seq)
        elif drafted:
            self.kind = "verify"

    def add_draft_model_chunk(self, lane: Lane, seq: Sequence, size: int) -> None:
        """Add the next `size` known tokens that the draft model lacks, in a step of it alone."""
        start = seq.draft_computed
        self.kind = "draft"
        plan = self._add(lane, seq, start, size, samples=0)
        plan.tokens += seq.tokens[start : start + size]
        plan.targets += [0] * size
        seq.draft_computed += size

    def _add(self, lane: Lane, seq: Sequence, start: int, size: int, samples: int) -> LanePlan:
        """Add a chunk to its lane's columns, but for its tokens, and return the lane's plan."""
        plan = self.lanes[lane.index]
        plan.sequences.append(seq.id)
        plan.rows.append(seq.row)
        plan.starts.append(start)
        plan.sizes.append(size)
        plan.samples.append(samples)
        self.budgets[lane.index] -= size
        self.scheduled.add(seq.id)
        seq.in_flight += 1
        return plan

    def build(self, number: int) -> StepPlan:
        """Return the finished plan."""
        if self.kind != "decode":
            for lane_plan in self.lanes:
                lane_plan.put_single_tokens_first()
        return StepPlan(number, self.kind, self.lanes, tuple(self.admissions), self.steps)


def admission_of(seq: Sequence) -> Admission:
    """Return what the device must know about a sequence that has just got a row."""
    params = seq.request.params
    allowed = params.allowed_token_ids
    return Admission(
        lane=seq.lane,
        row=seq.row,
        length=seq.num_computed,
        tables=tuple(tuple(pages) for pages in seq.pages),
        packed=pack_row(seq),
        prompt_tokens=seq.prompt_len,
        bias=tuple(params.logit_bias.items()),
        # A grammar's masks take allowed_token_ids in: the device then needs no list of its own.
        allowed=None if allowed is None or seq.constraint else tuple(allowed),
        history=tuple(seq.tokens) if penalises(params) else None,
    )
