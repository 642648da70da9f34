"""Requests from their submission to their end: sequences by id, and those that wait for a row."""

from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from math import inf

from jaxserve.config import EngineConfig
from jaxserve.engine.events import Finish, FinishReason, TokenEvent
from jaxserve.engine.host.draft_planner import DraftPlanner
from jaxserve.engine.host.grammar_constraint import Constraint
from jaxserve.engine.host.lane import Lane
from jaxserve.engine.host.prefix_cache import DigestChain
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.waiting_choices import WaitingChoices
from jaxserve.engine.request_limits import max_new_tokens
from jaxserve.errors import DeadlineError, EngineError, RequestIdInUseError
from jaxserve.request import Request

FEW_LIMITS = 64  # times that are kept in any case


class RequestQueue:
    """Every request that has not ended, and every sequence that still occupies anything.

    A request id is free again as soon as all choices have ended. A sequence stays in `sequences`
    longer: until no step in flight refers to its row and pages.
    """

    def __init__(self, config: EngineConfig, lanes: Seq[Lane], drafts: DraftPlanner):
        self.waiting = WaitingChoices()
        self.requests: dict[str, list[Sequence]] = {}  # choices by request id
        self.sequences: dict[int, Sequence] = {}  # waiting, running and leaving, by sequence id
        self._config = config
        self._lanes = lanes
        self._drafts = drafts
        self._next_id = 0
        # Times until which choices have to begin, with the sequence's id; the next one first. Those
        # of choices that have begun or ended stay for a while.
        self._start_limits: list[tuple[float, int]] = []

    # ---- Requests enter

    def submit(self, request: Request, seed: int, now: float) -> None:
        """Queue the choices of a request; raise RequestError if it can never run."""
        if request.id in self.requests:
            raise RequestIdInUseError(f"request id {request.id!r} is in flight already")
        max_tokens = max_new_tokens(self._config, request)
        choices: list[Sequence] = []
        for index in range(request.params.n):
            leader = choices[0] if choices else None
            choices.append(self._new_sequence(request, index, seed, max_tokens, leader, now))
        # Only now, as the grammar of a later choice may fail: nothing is kept of a refused request.
        self.requests[request.id] = choices
        for seq in choices:
            self._drafts.enter(seq)
            self.sequences[seq.id] = seq
            self.waiting.add(seq)
            if request.start_by is not None:
                heappush(self._start_limits, (request.start_by, seq.id))
        self._forget_old_limits()

    def _new_sequence(
        self,
        request: Request,
        index: int,
        seed: int,
        max_tokens: int,
        leader: Sequence | None,
        now: float,
    ) -> Sequence:
        seq = Sequence(self._next_id, request, index, seed, max_tokens, self._config.embeds, leader)
        seq.tokens = list(request.prompt)
        seq.chains = [DigestChain() for _ in self._config.pools]
        if request.grammar:
            seq.constraint = Constraint(request.grammar.matcher(), request.params)
        seq.times.submitted = now if request.since is None else request.since
        self._next_id += 1
        return seq

    # ---- Requests leave

    def abort(self, request_id: str, now: float) -> list[TokenEvent]:
        """End every choice of the request; unknown ids (ended already) are no error."""
        live = [seq for seq in self.requests.get(request_id, ()) if not seq.finish]
        return [self.end(seq, Finish(FinishReason.ABORT), now) for seq in live]

    def stop(self, request_id: str, index: int, now: float) -> TokenEvent | None:
        """End one choice whose text met a stop string; return None if it has ended already."""
        for seq in self.requests.get(request_id, ()):
            if seq.index == index and not seq.finish:
                return self.end(seq, Finish(FinishReason.STOP), now)
        return None

    def expire(self, now: float) -> list[TokenEvent]:
        """End every choice that has not begun and is too late to, with DeadlineError.

        A choice begins with its first chunk. Until then it ends even if it has a row, which others
        can use.
        """
        events: list[TokenEvent] = []
        later: list[tuple[float, int]] = []
        while self._start_limits and self._start_limits[0][0] < now:
            _, id = heappop(self._start_limits)
            seq = self.sequences.get(id)
            if seq is None or seq.finish or _has_begun(seq):
                continue
            limit = _start_limit(seq)
            if limit < now:
                events.append(self.end(seq, Finish(FinishReason.ERROR, error=_too_late()), now))
            else:
                later.append((limit if limit < inf else now, id))
        for entry in later:
            heappush(self._start_limits, entry)
        return events

    def _forget_old_limits(self) -> None:
        """Leave out the limits of choices that are gone, once these are most of all."""
        if len(self._start_limits) > 2 * len(self.sequences) + FEW_LIMITS:
            self._start_limits = [each for each in self._start_limits if each[1] in self.sequences]
            heapify(self._start_limits)

    def end(self, seq: Sequence, finish: Finish, now: float) -> TokenEvent:
        """End a choice and return its last event; row and pages follow once they are idle."""
        seq.finish = finish
        seq.times.finished = now
        if all(choice.finish for choice in self.requests[seq.request.id]):
            # The id is free again now, whatever steps are still in flight with the sequences.
            del self.requests[seq.request.id]
        if seq.row < 0:
            self.waiting.remove(seq)
            self._forget(seq)
        else:
            self.release_when_idle(seq)
        return TokenEvent(seq.request.id, seq.index, [], finish=finish, times=seq.times)

    def release_when_idle(self, seq: Sequence) -> None:
        """Take row and pages from an ended or preempted sequence that no step in flight refers to.

        A preempted sequence goes back to the waiting ones.
        """
        if seq.in_flight or seq.row < 0 or not (seq.finish or seq.preempted):
            return
        self._lanes[seq.lane].leave(seq)
        seq.preempted = False
        if seq.finish:
            self._forget(seq)
        else:
            self.waiting.add(seq)

    def _forget(self, seq: Sequence) -> None:
        del self.sequences[seq.id]
        self._drafts.leave(seq)

    def check_invariants(self) -> None:
        """Raise EngineError unless every sequence either waits without a row or runs in a lane."""
        queued = [*self.waiting, *(seq for lane in self._lanes for seq in lane.running)]
        if sorted(seq.id for seq in queued) != sorted(self.sequences):
            raise EngineError("a sequence is neither waiting nor running, or both")
        if any(seq.in_flight or seq.row >= 0 for seq in self.waiting):
            raise EngineError("a waiting sequence occupies a row or is in flight")


def _start_limit(seq: Sequence) -> float:
    """Return the time until which a choice has to begin; infinite while it waits for its prompt.

    A choice whose prompt another one has computed has the time that this took to spare.
    """
    start_by = seq.request.start_by
    assert start_by is not None
    leader = seq.leader
    if leader is None:
        return start_by
    if leader.times.first_token:
        return start_by + leader.times.first_token - leader.times.admitted
    computing = _has_begun(leader) and not leader.finish
    return inf if computing else start_by


def _has_begun(seq: Sequence) -> bool:
    """Return whether a chunk of the choice was launched, before a preemption or since."""
    return bool(
        seq.in_flight
        or seq.num_computed > seq.times.cached
        or seq.preempted
        or seq.times.preemptions
    )


def _too_late() -> DeadlineError:
    return DeadlineError("the answer could not begin in time to be whole by the deadline")
