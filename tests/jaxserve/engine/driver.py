"""Drives an engine over a FakeRunner and checks every promise of the host half after every step."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import BucketPlan, choose
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import FED_BACK, Finish, FinishReason, LanePlan, Logprob, StepKind, StepPlan, TokenEvent
from jaxserve.engine.scheduler import Proposer, Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.request import Request
from tests.fake_runner import VOCAB, FakeRunner, Spoils, naive

Choice = tuple[str, int]  # request id, choice index
Cut = tuple[StepKind, int, int]  # kind of step, start, size


def config_of(**changes: int | bool) -> EngineConfig:
    """A small engine."""
    base = EngineConfig(
        lanes=1,
        max_batch=4,
        step_tokens=16,
        page_size=4,
        num_pages=32,
        max_context=64,
        prefix_cache=True,
        deterministic=False,
        attention="reference",
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@dataclass
class Result:
    """What a client saw of one choice."""

    request: Request
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish: Finish | None = None
    told: FinishReason | None = None  # what the test itself asked for: abort or stop
    cuts: list[Cut] = field(default_factory=list)


def truth(request: Request, index: int, seed: int, max_tokens: int) -> tuple[list[int], Finish]:
    """All tokens of a choice that nobody disturbs, and why it ends."""
    tokens = naive(request, index, seed, max_tokens)
    for n, token in enumerate(tokens):
        if token in request.end_ids and n >= request.params.min_tokens:
            return tokens[: n + 1], Finish(FinishReason.STOP, stopped_by=token)
    return tokens, Finish(FinishReason.LENGTH)


class ScriptedProposer:
    """Drafts for requests whose salt has a "w": up to `most` tokens, right ones until a wrong one at every third place."""

    def __init__(self, most: int = 4):
        self.most = most

    def waits(self, request: Request) -> bool:
        return "w" in request.salt

    def propose(self, seq: Sequence) -> list[int]:
        known = len(seq.tokens)
        right = naive(seq.request, seq.index, seq.seed, known - seq.prompt_len + self.most)[known - seq.prompt_len :]
        drafts = [token if (known + n + seq.id) % 3 else (token + 1) % VOCAB for n, token in enumerate(right)]
        return drafts[: (known + seq.id) % (self.most + 1)]


class Driver:
    """An engine, what its clients saw, and what was launched."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        page_groups: int = 1,
        proposer: Proposer | None = None,
        executables_differ: bool = False,
        spoils: Spoils = lambda number, lane, row: False,
    ):
        self.config = config
        self.scheduler = Scheduler(config, page_groups=page_groups, fingerprint="fake", proposer=proposer)
        self.runner = FakeRunner(config, page_groups=page_groups, executables_differ=executables_differ, spoils=spoils)
        self.engine = Engine(self.scheduler, self.runner, clock=lambda: 1.0)
        self.results: dict[Choice, Result] = {}
        self.steps = 0
        self.plans: list[StepPlan] = []
        self._buckets = BucketPlan.of(config).buckets
        self._snapshot = ""
        self._spoils = spoils
        self._may_fail: set[Choice] = set()

    # ---- what clients do

    def submit(self, request: Request) -> None:
        seed = self.engine.submit(request)
        for index in range(request.params.n):
            self.results[request.id, index] = Result(request, seed)

    def abort(self, request_id: str) -> None:
        for (owner, _), result in self.results.items():
            if owner == request_id and not result.finish:
                result.told = FinishReason.ABORT
        self.engine.abort(request_id)

    def stop(self, request_id: str, index: int) -> None:
        """As a server does when the text so far met a stop string."""
        result = self.results[request_id, index]
        live = result.finish is None and result.told is None
        event = self.engine.stop(request_id, index)
        assert (event is not None) == live
        if event is not None:
            result.told = FinishReason.STOP
            self._take(event)

    # ---- steps

    def step(self) -> list[TokenEvent]:
        """One step of the engine, and all checks."""
        busy, number = self.engine.has_work, self.scheduler._steps
        idle = self.engine._in_flight is None
        previous, snapshot = self.engine._in_flight, self._snapshot
        events = self.engine.step()
        self.steps += 1
        launched = self.scheduler._steps > number
        assert launched or not idle or events or not busy, "nothing runs, nothing is in flight, and there is work"
        if previous:
            assert repr(previous[0]) == snapshot, "a plan changed after its launch"
        if launched:
            assert self.engine._in_flight is not None
            self._check_plan(self.engine._in_flight[0])
        self.scheduler.check_invariants()
        self._check_admission_order(launched)
        self._check_published()
        for event in events:
            self._take(event)
        return events

    def run(self, limit: int = 2000) -> None:
        """Steps until nothing is left, then what must hold of an engine at rest."""
        for _ in range(limit):
            if not self.engine.has_work:
                return self.check_rest()
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.unfinished()}")

    def unfinished(self) -> list[Choice]:
        return [choice for choice, result in self.results.items() if not result.finish]

    def _take(self, event: TokenEvent) -> None:
        result = self.results[event.request_id, event.index]
        assert result.finish is None, f"news of {event.request_id!r} after its end"
        assert event.tokens or event.prompt_logprobs or event.finish, "no news"
        assert (event.times is not None) == (event.finish is not None)
        result.tokens += event.tokens
        result.logprobs += event.logprobs or ()
        result.prompt_logprobs += event.prompt_logprobs or ()
        result.finish = event.finish
        if event.finish:
            self._check_result(event.request_id, event.index, result)

    # ---- checks

    def _check_result(self, request_id: str, index: int, result: Result) -> None:
        request, finish = result.request, result.finish
        assert finish is not None
        tokens, end = truth(request, index, result.seed, self.scheduler.max_tokens(request))
        if finish.reason == FinishReason.ERROR:
            assert (request_id, index) in self._may_fail and finish.error is not None
            end = finish
        if result.told:
            assert finish.reason == result.told
            end = finish
        assert finish == end, f"{request_id!r} choice {index} ended with {finish} instead of {end}"
        cut_short = finish.reason in (FinishReason.ABORT, FinishReason.ERROR) or result.told is not None
        expected = tokens[: len(result.tokens)] if cut_short else tokens
        assert result.tokens == expected, f"{request_id!r} choice {index}: {result.tokens} instead of {expected}"
        self._check_logprobs(index, result, whole=not cut_short)

    def _check_logprobs(self, index: int, result: Result, whole: bool) -> None:
        prompt, params = result.request.prompt, result.request.params
        chosen = [Logprob(t, -float(len(prompt) - 1 + n), ()) for n, t in enumerate(result.tokens)]
        assert result.logprobs == (chosen if params.logprobs is not None else [])
        scores = [Logprob(t, -float(p), ()) for p, t in enumerate(prompt[1:])]
        scores = scores if params.prompt_logprobs is not None and index == 0 else []
        assert result.prompt_logprobs == (scores if whole or result.tokens else scores[: len(result.prompt_logprobs)])

    def _check_plan(self, plan: StepPlan) -> None:
        self._snapshot = repr(plan)
        self.plans.append(plan)
        json.dumps(dataclasses.asdict(plan))
        bucket = choose(self._buckets, plan.kind, plan.num_rows, plan.num_tokens)
        assert plan.num_tokens > 0 and len(plan.lanes) == self.config.lanes
        for index, lane in enumerate(plan.lanes):
            columns = (lane.sequences, lane.rows, lane.starts, lane.sizes, lane.samples)
            assert len({len(column) for column in columns}) == 1
            assert sum(lane.sizes) == len(lane.tokens) == len(lane.targets) <= self.config.step_tokens
            for group in range(len(self.scheduler.lanes[0].caches)):
                assert sum(f[0] == group for f in lane.fresh) <= bucket.fresh_pages(self.config.page_size)
            self._check_chunks(plan, index, lane)

    def _check_chunks(self, plan: StepPlan, index: int, lane: LanePlan) -> None:
        at = 0
        for sequence, row, start, size in zip(lane.sequences, lane.rows, lane.starts, lane.sizes, strict=True):
            seq = self.scheduler._sequences.get(sequence)
            tokens, at = lane.tokens[at : at + size], at + size
            if seq is None:
                continue  # the last step that it was in has been committed meanwhile
            choice = (seq.request.id, seq.index)
            if self._spoils(plan.number, index, row):
                self._may_fail.add(choice)
            self.results[choice].cuts.append((plan.kind, start, size))
            if self.config.deterministic:
                self._check_deterministic(plan.kind, tokens, seq, start)

    def _check_deterministic(self, kind: StepKind, tokens: list[int], seq: Sequence, start: int) -> None:
        assert (tokens == [FED_BACK]) == (kind == "decode") and (FED_BACK in tokens) == (kind == "decode"), "mixed"
        assert start == 0 or kind == "decode" or start % self.config.chunk_border == 0, "a chunk begins between borders"
        assert kind == "decode" or len(tokens) <= self.config.chunk_border
        assert seq.times.preemptions == 0

    def _check_admission_order(self, launched: bool) -> None:
        """No waiting sequence is overtaken by one of lower rank, except while it waits for its leader."""
        if not launched:
            return
        admitted = {(a.lane, a.row) for a in self.plans[-1].admissions}
        ranks = [s.rank for lane in self.scheduler.lanes for s in lane.running if (lane.index, s.row) in admitted]
        for seq in self.scheduler.waiting:
            overtaken = any(rank > seq.rank for rank in ranks)
            assert not overtaken or self.scheduler._follows(seq) or seq.times.preemptions, f"{seq.id} was overtaken"

    def _check_published(self) -> None:
        """Device memory has, for every page that can be found, what finding it promises."""
        for lane, device in zip(self.scheduler.lanes, self.runner.lanes, strict=True):
            for cache, pages in zip(lane.caches, device.pages, strict=True):
                for entry in cache._entries.values():
                    slots = pages[entry.page]
                    assert tuple(slot[1] for slot in slots) == entry.tokens, f"page {entry.page} is not as published"
                    assert all(slot[2] == slot[2] for slot in slots), f"page {entry.page} is not finite"
                    assert [slot[0] - slots[0][0] for slot in slots] == list(range(cache.page_size))

    def check_rest(self) -> None:
        """Everybody had an end, and everything has come back."""
        assert not self.unfinished()
        assert not self.scheduler.waiting and not self.scheduler._requests and not self.scheduler._sequences
        for lane in self.scheduler.lanes:
            assert not lane.running and len(lane._free_rows) == self.config.max_batch
            assert [cache.pool.available for cache in lane.caches] == [self.config.num_pages] * len(lane.caches)


def run_alone(config: EngineConfig, request: Request, seed: int, **options: object) -> Driver:
    """The request in an engine of its own."""
    driver = Driver(config, **options)  # type: ignore[arg-type]
    driver.submit(dataclasses.replace(request, params=dataclasses.replace(request.params, seed=seed)))
    driver.run()
    return driver


def tokens_of(driver: Driver, choices: Iterable[Choice]) -> list[list[int]]:
    return [driver.results[choice].tokens for choice in choices]
