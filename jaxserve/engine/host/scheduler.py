"""Which tokens the next step computes. No phases: `num_computed` chases `num_tokens`, a step hands
out chunks.

A decode is a chunk of 1 (of several where decodes are launched as one, each feeding the next), a
prompt is cut into chunks under the step's token budget, a verification of k drafted tokens is a
chunk of 1 + k, a prefix hit begins further on, and a preempted sequence starts over from what is
still cached. Pages of a sequence that ended or was preempted come back when the last step launched
with it is committed.
"""

from bisect import insort
from collections.abc import Iterator

from jaxserve.config import EngineConfig
from jaxserve.engine.events import Finish, FinishReason, TokenEvent
from jaxserve.engine.host.grammar_constraint import Constraint
from jaxserve.engine.host.lane import Lane
from jaxserve.engine.host.prefix_cache import Chain
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.speculation import Speculation
from jaxserve.engine.plan import (
    FED_BACK,
    Admission,
    LaneOutput,
    LanePlan,
    StepKind,
    StepOutput,
    StepPlan,
)
from jaxserve.errors import (
    CapacityError,
    ContextLengthError,
    EngineError,
    NonFiniteLogitsError,
    RequestError,
    RequestIdInUseError,
)
from jaxserve.request import Request


class _Draft:
    """A step while it is being planned."""

    def __init__(self, lanes: int, budget: int, only: StepKind | None, steps: int):
        self.only = only
        self.steps = steps  # decodes of a row at most
        self.lanes = tuple(LanePlan() for _ in range(lanes))
        self.budgets = [budget] * lanes
        self.admissions: list[Admission] = []
        self.kind: StepKind = "decode"
        self.scheduled: set[int] = set()
        self.drafted: dict[int, list[int]] = {}  # tokens to verify, by sequence
        self.streams = (
            [0] * lanes
        )  # decodes still to be scheduled: prompts and drafted tokens leave them their budget

    def wants(self, seq: Sequence) -> bool:
        return (
            seq.id not in self.scheduled
            and seq.row >= 0
            and seq.runnable
            and self.only in (None, kind_of(seq))
        )


def kind_of(seq: Sequence) -> StepKind:
    """The step that the sequence's next chunk needs."""
    if seq.embeds:
        return "embed"
    if seq.decoding:
        return "decode"
    return "score" if seq.scoring else "prefill"


class Scheduler:
    """Waiting and running sequences of all lanes. Plain Python: no clock, no arrays."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        fingerprint: str = "",
        speculation: Speculation | None = None,
    ):
        self.config = config
        self.lanes = [Lane(i, config, fingerprint) for i in range(config.lanes)]
        self.waiting: list[Sequence] = []
        self.speculation = speculation
        self._requests: dict[str, list[Sequence]] = {}
        self._sequences: dict[int, Sequence] = {}
        self._next_sequence = 0
        self._steps = 0
        self.preemptions = 0  # in all
        self._several_since: float | None = (
            None  # when the last plan was made, if it had several decodes
        )
        self._several_seconds = 0.0
        self._last_kind: StepKind = "decode"
        self._last_prompts: StepKind = "score"  # the kind that prompts had last

    # ---- requests in, requests out

    def submit(self, request: Request, seed: int, now: float = 0.0) -> None:
        """Queue a request's choices; RequestError when it could never run."""
        if request.id in self._requests:
            raise RequestIdInUseError(f"request id {request.id!r} is in flight already")
        max_tokens = self.max_tokens(request)
        choices: list[Sequence] = []
        for index in range(request.params.n):
            leader = choices[0] if choices else None
            seq = Sequence(
                self._next_sequence, request, index, seed, max_tokens, self.config.embeds, leader
            )
            seq.tokens = list(request.prompt)
            seq.chains = [Chain() for _ in self.config.pools]
            if request.grammar:
                seq.constraint = Constraint(request.grammar.matcher(), request.params)
            if self.speculation:
                self.speculation.enter(seq)
            seq.times.submitted = now if request.since is None else request.since
            self._next_sequence += 1
            choices.append(seq)
        self._requests[request.id] = choices
        for seq in choices:
            self._sequences[seq.id] = seq
            insort(self.waiting, seq, key=lambda s: s.rank)

    def max_tokens(self, request: Request, name: str = "prompt") -> int:
        """max_tokens, or all that context and page pool leave; RequestError, with `name` as the
        field, without room.

        0 for a prompt that is embedded.
        """
        prompt, asked = len(request.prompt), request.params.max_tokens
        least = 0 if self.config.embeds else asked or 1
        what, way_out = f"{prompt} tokens", "shorten the prompt"
        if least:
            what, way_out = f"{what} and max_tokens {least}", f"{way_out}, lower max_tokens"
        if prompt == 0:
            raise RequestError(name, "has no tokens")
        if prompt + least > self.config.max_context:
            raise ContextLengthError(
                name,
                f"{what} exceed the context of {self.config.max_context} "
                f"({way_out}, or raise --max-context as far as the model allows)",
            )
        if prompt + least > self.config.capacity:
            raise CapacityError(
                name,
                f"{what} can never fit the page pool of {self.config.capacity} tokens "
                f"({way_out}, or raise --cache-tokens)",
            )
        return (
            0
            if self.config.embeds
            else asked or min(self.config.max_context, self.config.capacity) - prompt
        )

    def abort(self, request_id: str, now: float = 0.0) -> list[TokenEvent]:
        """End every choice of the request; unknown ids (ended already) are no error."""
        live = [seq for seq in self._requests.get(request_id, ()) if not seq.finish]
        return [self._end(seq, Finish(FinishReason.ABORT), now) for seq in live]

    def stop(self, request_id: str, index: int, now: float = 0.0) -> TokenEvent | None:
        """End one choice whose text met a stop string; None when it has ended already."""
        for seq in self._requests.get(request_id, ()):
            if seq.index == index and not seq.finish:
                return self._end(seq, Finish(FinishReason.STOP), now)
        return None

    def has(self, request_id: str) -> bool:
        """Whether it has not ended yet."""
        return request_id in self._requests

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    # ---- planning

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None when nothing can be launched."""
        drafts = (
            self.speculation is not None
            and not self.config.deterministic
            and not self._prompts_due()
        )
        if self.speculation:
            self.speculation.wake((seq for lane in self.lanes for seq in lane.running), drafts)
        for only in self._turns():
            draft = _Draft(len(self.lanes), self.config.step_tokens, only, self._steps_at_once(now))
            if drafts:
                self._draft_tokens(draft)
            if draft.kind != "draft":
                for lane in self.lanes:
                    self._continue_running(draft, lane)
            if draft.kind not in ("verify", "draft"):
                self._admit(draft, now)
            if draft.scheduled:
                if draft.kind != "decode":
                    for lane_plan in draft.lanes:
                        lane_plan.put_single_tokens_first()
                self._steps += 1
                self._note_several(draft.steps, now)
                self._last_kind = draft.kind
                self._last_prompts = draft.kind if draft.kind != "decode" else self._last_prompts
                return StepPlan(
                    self._steps, draft.kind, draft.lanes, tuple(draft.admissions), draft.steps
                )
        return None

    def _prompts_due(self) -> bool:
        """Whether somebody's chunk waits, or who could be admitted: drafts are verified in steps
        without prompts.
        """
        if any(seq.runnable and not seq.decoding for lane in self.lanes for seq in lane.running):
            return True
        first = next((seq for seq in self.waiting if not self._follows(seq)), None)
        if first is None:
            return False
        whole_step = _Draft(len(self.lanes), self.config.step_tokens, None, 1)
        return self._choose_lane(whole_step, first) is not None

    def _draft_tokens(self, draft: _Draft) -> None:
        """As many for each row as the step's budget has room for with all of them."""
        assert self.speculation
        decoding = [seq for lane in self.lanes for seq in lane.running if draft.wants(seq)]
        drafting = [seq for seq in decoding if self.speculation.drafts(seq)]
        rows = max(sum(seq.lane == lane.index for seq in decoding) for lane in self.lanes)
        most = self.config.step_tokens // max(rows, 1) - 1
        draft.drafted = self.speculation.draft(drafting, rows, len(decoding) - len(drafting), most)
        if draft.drafted:
            draft.steps = 1
            if self.speculation.proposer.has_pages:
                self._catch_up(draft, drafting)

    def _catch_up(self, draft: _Draft, drafting: list[Sequence]) -> None:
        """A step of the draft model alone, where its pages lack tokens of those who would draft.

        Every other step is another: whoever streams waits for one chunk at a time. Meanwhile those
        who lack many tokens draft none.
        """
        for seq in drafting:
            self.lanes[seq.lane].skip_drafted(seq)
        behind = [
            seq
            for seq in drafting
            if seq.id in draft.drafted and seq.draft_computed < seq.num_computed
        ]
        if self._last_kind != "draft" and any(seq.draft_computed < seq.num_known for seq in behind):
            draft.kind = "draft"
            for lane in self.lanes:
                self._add_drafted_chunks(
                    draft, lane, [seq for seq in behind if seq.lane == lane.index]
                )
        for seq in behind:
            del draft.drafted[seq.id]

    def _add_drafted_chunks(self, draft: _Draft, lane: Lane, seqs: list[Sequence]) -> None:
        """Nobody reads or writes pages that another writes: who shares a prefix has its turn later,
        and less to do.
        """
        plan, span = draft.lanes[lane.index], self.config.page_span
        seen, written = set[int](), set[int]()
        for seq in seqs:
            start = seq.draft_computed
            size = min(seq.num_known - start, draft.budgets[lane.index])
            pages = seq.pages[self.config.full_group][: span(start + size)]
            own = pages[start // self.config.page_size :]
            if size <= 0 or not (written.isdisjoint(pages) and seen.isdisjoint(own)):
                continue
            seen.update(pages)
            written.update(own)
            plan.sequences.append(seq.id)
            plan.rows.append(seq.row)
            plan.starts.append(start)
            plan.sizes.append(size)
            plan.samples.append(0)
            plan.tokens += seq.tokens[start : start + size]
            plan.targets += [0] * size
            draft.budgets[lane.index] -= size
            draft.scheduled.add(seq.id)
            seq.draft_computed += size
            seq.in_flight += 1

    def _note_several(self, steps: int, now: float) -> None:
        """Learn how long a launch of several decodes takes, from one to the next."""
        if steps > 1 and self._several_since is not None:
            self._several_seconds = now - self._several_since
        self._several_since = now if steps > 1 else None

    def _turns(self) -> tuple[StepKind | None, ...]:
        """Kinds to try, in order. Mixed steps unless deterministic; there, prompts and decodes take
        turns.
        """
        if not self.config.deterministic or self.config.embeds:
            return (None,)
        prompts: tuple[StepKind, ...] = (
            ("prefill", "score") if self._last_prompts == "score" else ("score", "prefill")
        )
        return (*prompts, "decode") if self._last_kind == "decode" else ("decode", *prompts)

    def _steps_at_once(self, now: float) -> int:
        """How many decode steps to launch as one: several only where all rows stream and nobody
        else could run.

        And only where no row's deadline lies inside, as far as the time between the last two such
        launches tells.

        Whoever waits for a row has to wait until one of these ends: several decodes as one delay it
        by less than so many steps, and waiting is what it does most of the time.
        """
        together = self.config.decode_steps
        if together == 1 or any(
            lane.blocked or (self.waiting and lane.has_row) for lane in self.lanes
        ):
            return 1
        running = [seq for lane in self.lanes for seq in lane.running]
        left = max((seq.limit - seq.num_tokens for seq in running if seq.streaming), default=0)
        if left < together or any(seq.wants_single_steps for seq in running):
            return 1
        ends = now + 2 * self._several_seconds  # one is in flight
        if any(seq.request.deadline is not None and seq.request.deadline < ends for seq in running):
            return 1
        return together if all(lane.has_page_for_everyone(together) for lane in self.lanes) else 1

    def _continue_running(self, draft: _Draft, lane: Lane) -> None:
        """Decodes first: a long prompt must not hold up the streams. Then prompts, in rank order.

        Before all of them who lacked pages in the step before: nobody is scheduled yet whom it
        could not preempt.
        """
        if lane.blocked is None and draft.only in (None, "decode") and lane.has_page_for_everyone():
            self._decode_all(draft, lane)
        wanting = [s for s in lane.running if draft.wants(s)]
        wanting.sort(key=lambda s: (s is not lane.blocked, not s.decoding))
        lane.blocked = None
        streams = {s.id for s in wanting if s.decoding}
        draft.streams[lane.index] = len(streams)
        for seq in wanting:
            draft.streams[lane.index] -= seq.id in streams
            if draft.wants(seq):  # it may have been preempted meanwhile
                self._schedule(draft, lane, seq)

    def _decode_all(self, draft: _Draft, lane: Lane) -> None:
        """Schedule every plain decode at once, where none of them can lack a page: what most steps
        are made of.
        """
        seqs = [seq for seq in lane.running if seq.streaming and seq.id not in draft.drafted]
        plan, ids, sizes = draft.lanes[lane.index], [seq.id for seq in seqs], [1] * len(seqs)
        if draft.steps > 1:  # otherwise it would be 1 for all: this is the hottest path of the host
            sizes = [min(draft.steps, seq.limit - seq.num_tokens) for seq in seqs]
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
        draft.budgets[lane.index] -= len(seqs)
        draft.scheduled.update(ids)
        for seq, size in zip(seqs, sizes, strict=True):
            seq.num_computed += size
            seq.in_flight += 1
            seq.unread += size

    def _admit(self, draft: _Draft, now: float) -> None:
        """Waiting sequences enter in rank order while a lane has row, pages and budget for the
        first of them.
        """
        for seq in list(self.waiting):
            if self._follows(seq):
                continue
            found = self._choose_lane(draft, seq) if draft.only in (None, kind_of(seq)) else None
            if found is None:
                return  # nobody overtakes it
            lane, hit = found
            self.waiting.remove(seq)
            lane.enter(seq, hit)
            if not seq.times.admitted:
                seq.times.admitted, seq.times.cached = now, seq.num_computed
            if self.config.deterministic:
                lane.reserve(seq, seq.limit)
            draft.admissions.append(self._admission(seq))
            self._schedule(draft, lane, seq)

    def _follows(self, seq: Sequence) -> bool:
        """A choice waits until choice 0 has published the prompt's pages that they share."""
        leader = seq.leader
        unit = self.config.chunk_border if self.config.deterministic else self.config.page_size
        if (
            leader is None
            or leader.finish
            or not self.config.prefix_cache
            or seq.prompt_len <= unit
        ):
            return False
        return leader.num_generated == 0 or leader.settled < leader.prompt_len

    def _choose_lane(self, draft: _Draft, seq: Sequence) -> tuple[Lane, list[list[int]]] | None:
        """The lane with the longest cached prefix, then the most pages, among those that can take
        the sequence now.
        """
        reserve = seq.limit if self.config.deterministic else len(seq.tokens) + 1
        best: tuple[tuple[int, int], Lane, list[list[int]]] | None = None
        for lane in self.lanes:
            if not lane.has_row or lane.blocked or draft.budgets[lane.index] == 0:
                continue
            hit = lane.hit(seq)
            if (
                not lane.fits(seq, hit, min(reserve, self.config.capacity))
                or self._size(draft, lane, seq, len(hit[0])) == 0
            ):
                continue
            score = (len(hit[0]), lane.available_pages())
            if best is None or score > best[0]:
                best = score, lane, hit
        return best and best[1:]

    def _size(self, draft: _Draft, lane: Lane, seq: Sequence, hit_pages: int = 0) -> int:
        """Tokens of the sequence's next chunk; 0 when the budget does not allow it."""
        budget = draft.budgets[lane.index] - (0 if seq.decoding else draft.streams[lane.index])
        start = seq.num_computed if seq.row >= 0 else hit_pages * self.config.page_size
        wanted = seq.num_tokens - start
        if not self.config.deterministic or seq.decoding:
            return min(wanted, budget)
        border = self.config.chunk_border
        whole = min(wanted, (start // border + 1) * border - start)
        return whole if whole <= budget else 0

    def _schedule(self, draft: _Draft, lane: Lane, seq: Sequence) -> None:
        """Put the sequence's next chunk into the step, if budget and pages allow."""
        size = self._size(draft, lane, seq)
        if size == 0:
            return
        fresh = self._make_room(draft, lane, seq, seq.num_computed + size)
        if fresh is None:
            if lane.blocked is None or seq.rank < lane.blocked.rank:
                lane.blocked = seq
            return
        drafted = self._drafts(draft, lane, seq, size)
        more = lane.extend(seq, seq.num_computed + size + len(drafted))
        if more is None:
            drafted, more = [], []  # a draft is not worth a preemption
        self._add_chunk(draft, lane, seq, size, drafted, fresh + more)

    def _drafts(self, draft: _Draft, lane: Lane, seq: Sequence, size: int) -> list[int]:
        """Proposed tokens to verify with the newest one: as many as budget and max_tokens leave use
        for.

        None of who was preempted meanwhile and enters again in this step.
        """
        if not seq.decoding:
            return []
        spare = draft.budgets[lane.index] - draft.streams[lane.index]
        most = min(spare - size, seq.max_tokens - seq.num_generated - 1)
        drafted = draft.drafted.get(seq.id, [])[: max(most, 0)]
        return drafted[: seq.constraint.fits(drafted)] if seq.constraint and drafted else drafted

    def _make_room(
        self, draft: _Draft, lane: Lane, seq: Sequence, tokens: int
    ) -> list[tuple[int, int, int, int]] | None:
        """Pages for `tokens` positions, preempting sequences of lower rank; None: not in this
        step."""
        while (fresh := lane.extend(seq, tokens)) is None:
            if lane.draining:
                return None  # pages are on their way
            victims = [s for s in lane.running if s.rank > seq.rank and s.id not in draft.scheduled]
            if not victims:
                return None
            self._preempt(lane, victims[-1])
        return fresh

    def _preempt(self, lane: Lane, seq: Sequence) -> None:
        seq.preempted = True
        seq.times.preemptions += 1
        self.preemptions += 1
        self._release_when_idle(seq)

    def _add_chunk(
        self,
        draft: _Draft,
        lane: Lane,
        seq: Sequence,
        size: int,
        drafted: list[int],
        fresh: list[tuple[int, int, int, int]],
    ) -> None:
        plan, start = draft.lanes[lane.index], seq.num_computed
        last = start + size == seq.num_tokens
        samples = 1 + len(drafted) if last and not seq.embeds else 0
        if not seq.decoding:
            draft.kind = "score" if draft.kind == "score" else kind_of(seq)
        elif drafted:
            draft.kind = "verify"
        known = [FED_BACK] if seq.decoding else seq.tokens[start : start + size]
        plan.sequences.append(seq.id)
        plan.rows.append(seq.row)
        plan.starts.append(start)
        plan.sizes.append(size + len(drafted))
        plan.samples.append(samples)
        plan.tokens += known + drafted
        plan.targets += [
            *seq.tokens[start + 1 : start + size],
            seq.tokens[start + size] if not last else 0,
            *drafted,
        ]
        plan.fresh += fresh
        plan.logprobs |= seq.request.params.logprobs is not None
        if samples and seq.constraint:
            plan.masks.append((seq.row, seq.constraint.masks(drafted)))
        draft.budgets[lane.index] -= size + len(drafted)
        draft.scheduled.add(seq.id)
        if drafted and seq.draft_computed == seq.num_computed:
            seq.draft_computed += size + len(drafted)
        seq.num_computed += size + len(drafted)
        seq.in_flight += 1
        seq.unread += samples
        seq.newest_on_device |= samples > 0

    def _admission(self, seq: Sequence) -> Admission:
        p = seq.request.params
        penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        return Admission(
            lane=seq.lane,
            row=seq.row,
            length=seq.num_computed,
            tables=tuple(tuple(pages) for pages in seq.pages),
            prompt_tokens=seq.prompt_len,
            choice=seq.index,
            seed=seq.seed,
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            logprobs=-1 if p.logprobs is None else p.logprobs,
            min_tokens=p.min_tokens,
            end_ids=tuple(sorted(seq.request.end_ids)),
            bias=tuple(p.logit_bias.items()),
            allowed=None
            if p.allowed_token_ids is None or seq.constraint
            else tuple(p.allowed_token_ids),
            masked=p.allowed_token_ids is not None or seq.constraint is not None,
            history=tuple(seq.tokens) if penalised else None,
        )

    # ---- committing

    def commit(self, plan: StepPlan, output: StepOutput, now: float = 0.0) -> list[TokenEvent]:
        """Take in what a step returned: tokens to their sequences, ends, pages to the cache and
        back to the pools.
        """
        events = []
        for lane, lane_plan, result in zip(self.lanes, plan.lanes, output.lanes, strict=True):
            scores = self._split_scores(lane_plan, result)
            plain = (
                plan.kind == "decode"
                and plan.steps == 1
                and not (result.logprobs or lane.has_windows)
            )
            for i, sequence_id in enumerate(lane_plan.sequences):
                seq, samples = self._sequences[sequence_id], lane_plan.samples[i]
                tokens = result.tokens[i]
                if (
                    plain
                    and tokens
                    and result.finite[i]
                    and seq.takes_decoded(tokens[0], self.config.page_size)
                ):
                    events.append(TokenEvent(seq.request.id, seq.index, tokens))
                    continue
                seq.in_flight -= 1
                seq.unread -= samples
                if plan.kind == "verify" and samples > 1:
                    self._learn(seq, samples, len(tokens))
                if plan.kind == "draft":
                    lane.note_drafted(seq, lane_plan.starts[i] + lane_plan.sizes[i])
                else:
                    event = self._settle(lane, seq, lane_plan, result, i, next(scores), now)
                    if event is not None:
                        events.append(event)
                if seq.finish or seq.preempted:
                    self._release_when_idle(seq)
        return events

    def _learn(self, seq: Sequence, samples: int, taken: int) -> None:
        """How many of its drafts were right; what its draft model has of the others is not what
        comes there.
        """
        assert self.speculation
        if self.speculation.proposer.has_pages:
            seq.draft_computed -= samples - taken
        if not seq.finish:
            self.speculation.learn(seq, samples - 1, max(taken - 1, 0))

    def _split_scores(self, plan: LanePlan, result: LaneOutput) -> Iterator[list | None]:
        """Each chunk's share of the packed prompt log-probabilities."""
        at = 0
        for size in plan.sizes:
            yield (
                result.prompt_logprobs[at : at + size]
                if result.prompt_logprobs is not None
                else None
            )
            at += size

    def _settle(
        self,
        lane: Lane,
        seq: Sequence,
        plan: LanePlan,
        result: LaneOutput,
        i: int,
        scores: list | None,
        now: float,
    ) -> TokenEvent | None:
        """Commit chunk i of a lane's plan."""
        size, samples, tokens = plan.sizes[i], plan.samples[i], result.tokens[i]
        start, computed = plan.starts[i], size
        if (
            samples
        ):  # the chunk's known tokens end with the newest one: what `starts` says may be more
            start, computed = len(seq.tokens) - (1 + size - samples), size - samples + len(tokens)
        seq.num_computed -= size - computed  # rejected drafts, decodes after an end
        if seq.finish:
            return None  # ended while this step was in flight: its token is nobody's
        event = TokenEvent(seq.request.id, seq.index, [])
        if not result.finite[i]:
            ended = self._append(
                seq, event, tokens[:-1], result.logprobs[i] if result.logprobs else None
            )
            return self._finish(
                seq, event, ended or Finish(FinishReason.ERROR, error=_non_finite(seq)), now
            )
        if scores is not None and seq.scores_prompt and seq.scored < seq.prompt_len - 1:
            # `start` is before `scored` when a preempted prompt is computed again
            event.prompt_logprobs = scores[seq.scored - start : seq.prompt_len - 1 - start]
            seq.scored = max(seq.scored, min(start + size, seq.prompt_len - 1))
        if tokens and not seq.times.first_token:
            seq.times.first_token, event.times = now, seq.times
        finish = self._append(seq, event, tokens, result.logprobs[i] if result.logprobs else None)
        if tokens and not finish and (forced := self._forced(seq)):
            finish = self._append(seq, event, forced, None)
            seq.newest_on_device = False  # the row holds the token before them
        if not seq.preempted:
            lane.settle(
                seq, min(start + computed, len(seq.tokens))
            )  # drafts after an end are nobody's
        if result.embeddings and start + size == seq.prompt_len:
            event.embedding, finish = result.embeddings[i], Finish(FinishReason.STOP)
        if finish is not None:
            return self._finish(seq, event, finish, now)
        return event if event.tokens or event.prompt_logprobs else None

    def _forced(self, seq: Sequence) -> list[int]:
        """Tokens that need no sampling: as a part of a prompt, they go in one chunk, with the
        newest one before them.

        Not where each token has to come out of the one decode step.
        """
        return seq.constraint.forced() if seq.constraint and not self.config.deterministic else []

    def _finish(self, seq: Sequence, event: TokenEvent, finish: Finish, now: float) -> TokenEvent:
        """The event as the sequence's last."""
        ended = self._end(seq, finish, now)
        event.finish, event.times = ended.finish, ended.times
        return event

    def _append(
        self, seq: Sequence, event: TokenEvent, tokens: list[int], logprobs: list | None
    ) -> Finish | None:
        """Add tokens up to the one that ends the choice, if one does."""
        request, known = seq.request, seq.tokens
        if request.params.logprobs is not None:
            event.logprobs = []
        first_end = (
            seq.prompt_len + request.params.min_tokens
        )  # an end token ends only behind so many
        for n, token in enumerate(tokens):
            known.append(token)
            event.tokens.append(token)
            if event.logprobs is not None and logprobs:
                event.logprobs.append(logprobs[n])
            if token in request.end_ids and len(known) > first_end:
                return Finish(FinishReason.STOP, stopped_by=token)
            if seq.constraint and (finish := seq.constraint.take(token)):
                return finish
            if len(known) >= seq.limit:
                return Finish(FinishReason.LENGTH)
        return None

    def _end(self, seq: Sequence, finish: Finish, now: float) -> TokenEvent:
        seq.finish = finish
        seq.times.finished = now
        if all(choice.finish for choice in self._requests[seq.request.id]):
            del self._requests[seq.request.id]  # its id is free again, whatever is still in flight
        if seq.row < 0:
            self.waiting.remove(seq)
            self._forget(seq)
        else:
            self._release_when_idle(seq)
        return TokenEvent(seq.request.id, seq.index, [], finish=finish, times=seq.times)

    def _release_when_idle(self, seq: Sequence) -> None:
        """Give row and pages back once nothing in flight refers to them; a preempted sequence
        queues again.
        """
        if seq.in_flight or seq.row < 0 or not (seq.finish or seq.preempted):
            return
        self.lanes[seq.lane].leave(seq)
        seq.preempted = False
        if seq.finish:
            self._forget(seq)
        else:
            insort(self.waiting, seq, key=lambda s: s.rank)

    def _forget(self, seq: Sequence) -> None:
        del self._sequences[seq.id]
        if self.speculation:
            self.speculation.leave(seq)

    def flush_cache(self) -> None:
        """Forget every cached page that nobody holds."""
        for lane in self.lanes:
            for cache in lane.caches:
                cache.pool.drop_idle()

    def check_invariants(self) -> None:
        """EngineError with the numbers when pages, rows or queues do not add up."""
        for lane in self.lanes:
            lane.check_invariants()
        queued = [*self.waiting, *(seq for lane in self.lanes for seq in lane.running)]
        if sorted(seq.id for seq in queued) != sorted(self._sequences):
            raise EngineError("a sequence is neither waiting nor running, or both")
        if any(seq.in_flight or seq.row >= 0 for seq in self.waiting):
            raise EngineError("a waiting sequence occupies a row or is in flight")


def _non_finite(seq: Sequence) -> NonFiniteLogitsError:
    return NonFiniteLogitsError(
        f"request {seq.request.id!r}, choice {seq.index}: the "
        f"{'values' if seq.embeds else 'logits'} after "
        f"{len(seq.tokens)} tokens are NaN or infinite"
    )
