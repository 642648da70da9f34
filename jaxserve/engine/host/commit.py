"""Taking in what a step computed: tokens, ends, and pages that can be found or given back."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxserve.config import EngineConfig
from jaxserve.engine.events import Finish, FinishReason, Logprob, TokenEvent
from jaxserve.engine.host.draft_planner import DraftPlanner
from jaxserve.engine.host.lane import Lane
from jaxserve.engine.host.queue import RequestQueue
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.plan import LaneOutput, LanePlan, StepOutput, StepPlan
from jaxserve.errors import NonFiniteLogitsError


@dataclass(slots=True)
class _Chunk:
    """Plan and result of one chunk; the fields are those of LanePlan and LaneOutput."""

    start: int
    size: int
    samples: int
    tokens: list[int]
    finite: bool
    logprobs: list[Logprob] | None  # of `tokens`
    prompt_logprobs: list[Logprob] | None  # of the chunk's targets, in score steps
    embedding: list[float] | None


class Committer:
    """Brings sequences, lanes and queue up to date with the output of a step."""

    def __init__(
        self, config: EngineConfig, lanes: Seq[Lane], queue: RequestQueue, drafts: DraftPlanner
    ):
        self._config = config
        self._lanes = lanes
        self._queue = queue
        self._drafts = drafts

    def commit(self, plan: StepPlan, output: StepOutput, now: float) -> list[TokenEvent]:
        """Take in the output of a step and return what happened to its sequences."""
        events: list[TokenEvent] = []
        page_size = self._config.page_size
        sequences = self._queue.sequences
        for lane, lane_plan, result in zip(self._lanes, plan.lanes, output.lanes, strict=True):
            # A plain decode usually gives a token and nothing else. Such chunks are most of what a
            # busy engine commits, and take a path of their own.
            plain = (
                plan.kind == "decode" and plan.steps == 1 and not (result.logprobs or lane.slides)
            )
            # Advanced on the slow path only, where every chunk of a score step goes.
            prompt_logprobs = _split_by_chunk(lane_plan, result.prompt_logprobs)
            for i, sequence_id in enumerate(lane_plan.sequences):
                seq = sequences[sequence_id]
                tokens = result.tokens[i]
                if (
                    plain
                    and tokens
                    and result.finite[i]
                    and seq.takes_decoded(tokens[0], page_size)
                ):
                    events.append(TokenEvent(seq.request.id, seq.index, tokens))
                    continue
                chunk = _chunk_of(lane_plan, result, i, next(prompt_logprobs))
                event = self._commit_chunk(plan, lane, seq, chunk, now)
                if event is not None:
                    events.append(event)
        return events

    def _commit_chunk(
        self, plan: StepPlan, lane: Lane, seq: Sequence, chunk: _Chunk, now: float
    ) -> TokenEvent | None:
        seq.in_flight -= 1
        seq.unread -= chunk.samples
        if plan.kind == "verify" and chunk.samples > 1:
            self._drafts.learn(seq, chunk.samples, len(chunk.tokens))
        event = None
        if plan.kind == "draft":
            lane.note_drafted(seq, chunk.start + chunk.size)
        else:
            event = self._settle(lane, seq, chunk, now)
        if seq.finish or seq.preempted:
            self._queue.release_when_idle(seq)
        return event

    def _settle(self, lane: Lane, seq: Sequence, chunk: _Chunk, now: float) -> TokenEvent | None:
        """Give the chunk's tokens to the sequence, and its pages to the prefix cache."""
        start = chunk.start
        computed = chunk.size
        if chunk.samples:
            # The plan's start is an upper bound if earlier drafted tokens were in flight then. The
            # chunk's known tokens end with the newest one that the host has read.
            start = len(seq.tokens) - (1 + chunk.size - chunk.samples)
            computed = chunk.size - chunk.samples + len(chunk.tokens)
        # Take rejected drafted tokens, and decodes planned beyond an end, out of the count.
        seq.num_computed -= chunk.size - computed
        if seq.finish:
            return None  # It ended while this step was in flight: the tokens are dropped.
        event = TokenEvent(seq.request.id, seq.index, [])
        if not chunk.finite:
            # The last token was drawn from logits that are not finite; those before it are good.
            ended = self._append(seq, event, chunk.tokens[:-1], chunk.logprobs)
            finish = ended or Finish(FinishReason.ERROR, error=_non_finite(seq))
            return self._finish(seq, event, finish, now)
        self._report_prompt_logprobs(seq, event, start, chunk)
        if chunk.tokens and not seq.times.first_token:
            seq.times.first_token = now
            event.times = seq.times
        finish = self._append_all(seq, event, chunk)
        if not seq.preempted:
            # Positions behind the end of the output may hold drafted tokens: not part of it.
            lane.settle(seq, min(start + computed, len(seq.tokens)))
        if chunk.embedding is not None and start + chunk.size == seq.prompt_len:
            event.embedding = chunk.embedding
            finish = Finish(FinishReason.STOP)
        if finish is not None:
            return self._finish(seq, event, finish, now)
        return event if event.tokens or event.prompt_logprobs else None

    def _report_prompt_logprobs(
        self, seq: Sequence, event: TokenEvent, start: int, chunk: _Chunk
    ) -> None:
        """Put the scores of prompt tokens into the event that were not reported before."""
        last = seq.prompt_len - 1  # position whose target is the first token of the output
        if chunk.prompt_logprobs is None or not seq.scores_prompt or seq.scored >= last:
            return
        # `start` lies before `scored` if the prompt is computed again after a preemption.
        event.prompt_logprobs = chunk.prompt_logprobs[seq.scored - start : last - start]
        seq.scored = max(seq.scored, min(start + chunk.size, last))

    def _append_all(self, seq: Sequence, event: TokenEvent, chunk: _Chunk) -> Finish | None:
        """Append the chunk's tokens, and those that the grammar forces behind them."""
        finish = self._append(seq, event, chunk.tokens, chunk.logprobs)
        if finish or not chunk.tokens:
            return finish
        if forced := self._forced(seq):
            finish = self._append(seq, event, forced, None)
            # The row holds the token before the forced ones: the next chunk sends them all.
            seq.newest_on_device = False
        return finish

    def _forced(self, seq: Sequence) -> list[int]:
        """Return tokens that need no sampling, since the grammar lets no other come.

        They are computed like a part of a prompt, in one chunk. A deterministic engine forces none:
        each of its tokens has to come out of the one decode step.
        """
        if seq.constraint is None or self._config.deterministic:
            return []
        return seq.constraint.forced()

    def _append(
        self, seq: Sequence, event: TokenEvent, tokens: list[int], logprobs: list[Logprob] | None
    ) -> Finish | None:
        """Append tokens up to the one that ends the choice; return how it ended, if it did."""
        request = seq.request
        known = seq.tokens
        if request.params.logprobs is not None:
            event.logprobs = []
        # End tokens only count behind the first min_tokens tokens of the output.
        first_end = seq.prompt_len + request.params.min_tokens
        for n, token in enumerate(tokens):
            known.append(token)
            event.tokens.append(token)
            if event.logprobs is not None and logprobs:
                event.logprobs.append(logprobs[n])
            if token in request.end_ids and len(known) > first_end:
                return Finish(FinishReason.STOP, stopped_by=token)
            last = n + 1 == len(tokens)
            if seq.constraint and (finish := seq.constraint.take(token, last)):
                return finish
            if len(known) >= seq.limit:
                return Finish(FinishReason.LENGTH)
        return None

    def _finish(self, seq: Sequence, event: TokenEvent, finish: Finish, now: float) -> TokenEvent:
        """End the sequence and turn `event` into its last one."""
        ended = self._queue.end(seq, finish, now)
        event.finish = ended.finish
        event.times = ended.times
        return event


def _chunk_of(
    plan: LanePlan, result: LaneOutput, i: int, prompt_logprobs: list[Logprob] | None
) -> _Chunk:
    return _Chunk(
        plan.starts[i],
        plan.sizes[i],
        plan.samples[i],
        result.tokens[i],
        result.finite[i],
        result.logprobs[i] if result.logprobs else None,
        prompt_logprobs,
        result.embeddings[i] if result.embeddings else None,
    )


def _split_by_chunk(plan: LanePlan, packed: list[Logprob] | None) -> Iterator[list[Logprob] | None]:
    """Yield each chunk's share of packed prompt log-probabilities; None if there are none."""
    begin = 0
    for size in plan.sizes:
        yield None if packed is None else packed[begin : begin + size]
        begin += size


def _non_finite(seq: Sequence) -> NonFiniteLogitsError:
    what = "values" if seq.embeds else "logits"
    return NonFiniteLogitsError(
        f"request {seq.request.id!r}, choice {seq.index}: the {what} after "
        f"{len(seq.tokens)} tokens are NaN or infinite"
    )
