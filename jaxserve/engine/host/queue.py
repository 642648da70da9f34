"""Requests from their submission to their end: sequences by id, and those that wait for a row."""

from bisect import insort
from collections.abc import Sequence as Seq

from jaxserve.config import EngineConfig
from jaxserve.engine.events import Finish, FinishReason, TokenEvent
from jaxserve.engine.host.draft_planner import DraftPlanner
from jaxserve.engine.host.grammar_constraint import Constraint
from jaxserve.engine.host.lane import Lane
from jaxserve.engine.host.prefix_cache import DigestChain
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.request_limits import max_new_tokens
from jaxserve.errors import EngineError, RequestIdInUseError
from jaxserve.request import Request


class RequestQueue:
    """Every request that has not ended, and every sequence that still occupies anything.

    A request id is free again as soon as all choices have ended. A sequence stays in `sequences`
    longer: until no step in flight refers to its row and pages.
    """

    def __init__(self, config: EngineConfig, lanes: Seq[Lane], drafts: DraftPlanner):
        self.waiting: list[Sequence] = []  # without a row, in order of service
        self.requests: dict[str, list[Sequence]] = {}  # choices by request id
        self.sequences: dict[int, Sequence] = {}  # waiting, running and leaving, by sequence id
        self._config = config
        self._lanes = lanes
        self._drafts = drafts
        self._next_id = 0

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
            self._wait(seq)

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

    def _wait(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=lambda waiting: waiting.rank)

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
            self._wait(seq)

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
