"""Driver: runs an engine over a FakeRunner as a server would, and checks every step of it."""

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig, Pool
from jaxserve.engine.engine import Engine
from jaxserve.engine.events import FinishReason, TokenEvent
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.speculation import DeviceDrafts, Proposer, Speculation
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.engine.plan import DRAFTED as BY_DEVICE
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fake_groups import Slot
from tests.fake_model import VOCAB, naive
from tests.fake_runner import FakeRunner, PagesRead
from tests.jaxserve.engine.host.checks import (
    Result,
    check_deterministic,
    check_embedding,
    check_held,
    check_order,
    check_plan,
    check_published,
    check_rest,
    check_result,
)

DRAFTED = 7
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)


def config_of(
    *, num_pages: int = 32, windows: tuple[int | None, ...] = (None,), **changes: Any
) -> EngineConfig:
    """Return a small engine's configuration; every page group has `num_pages` pages."""
    base = EngineConfig(
        lanes=1,
        min_rows=1,
        max_batch=4,
        step_tokens=16,
        decode_steps=1,
        kv="float32",
        page_size=4,
        pools=tuple(Pool(num_pages, window) for window in windows),
        max_context=64,
        prefix_cache=True,
        deterministic=False,
        attention="reference",
        grouped_matmul="reference",
        quantized_matmul="reference",
        recurrence="reference",
    )
    return dataclasses.replace(base, **changes)


def request(
    name: str = "a",
    prompt: tuple[int, ...] = PROMPT,
    priority: int = 0,
    salt: str = "",
    client: str = "",
    **params: Any,
) -> Request:
    """Return a request with seed 1 for 4 tokens, unless `params` say otherwise."""
    chosen: dict[str, Any] = {"seed": 1, "max_tokens": 4} | params
    return Request(
        id=name,
        prompt=prompt,
        priority=priority,
        salt=salt,
        client=client,
        params=SamplingParams(**chosen),
    )


class ScriptedProposer:
    """Proposer that drafts up to `max_drafts` tokens for requests whose salt has a "w".

    Every `wrong_every`-th of them is wrong.
    """

    waits = True
    has_pages = False

    def __init__(self, max_drafts: int = 4, wrong_every: int = 3, window: int | None = None):
        self.max_drafts = max_drafts
        self.wrong_every = wrong_every
        self.window = window

    def takes(self, request: Request) -> bool:
        return "w" in request.salt

    def forget(self, seq: Sequence) -> None:
        pass

    def propose(self, seq: Sequence) -> list[int]:
        known = len(seq.tokens)
        generated = seq.num_generated
        count = generated + self.max_drafts
        right = naive(seq.request, seq.index, seq.seed, count, self.window)[generated:]
        drafts = [
            token if (known + n + seq.id) % self.wrong_every else (token + 1) % VOCAB
            for n, token in enumerate(right)
        ]
        return drafts[: (known + seq.id) % (self.max_drafts + 1)]


class ScriptedSpeculation(Speculation):
    """Speculation in which the device drafts for requests whose salt has a "w".

    The number of tokens is a checksum of plan and sequence.
    """

    def __init__(self, max_drafts: int):
        super().__init__(DeviceDrafts(max_drafts, has_pages=True), max_drafts)
        self._plans = 0

    def may_draft(self, seq: Sequence) -> bool:
        return "w" in seq.request.salt

    def draft(
        self, seqs: Iterable[Sequence], rows: int, plain: int, limit: int
    ) -> dict[int, list[int]]:
        self._plans += 1
        counts = {seq.id: (self._plans * 7 + seq.id * 3) % (self.max_drafts + 1) for seq in seqs}
        return {id: [BY_DEVICE] * count for id, count in counts.items() if count}


class EagerProposer(ScriptedProposer):
    """Proposer that drafts for every request."""

    def takes(self, request: Request) -> bool:
        return True


class Driver:
    """An engine, its device, and everything that its clients saw.

    It stands between the two as the engine's runner.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        proposer: Proposer | None = None,
        speculation: Speculation | None = None,
        **runner_options: Any,
    ):
        speculation = Speculation(proposer, max_drafts=DRAFTED) if proposer else speculation
        if speculation:
            how = "draft" if speculation.proposer.has_pages else "ngram"
            config = dataclasses.replace(config, speculate=how, draft_tokens=DRAFTED)
        self.config = config
        self.scheduler = Scheduler(config, fingerprint="fake", speculation=speculation)
        self.runner = FakeRunner(config, **runner_options)
        self.engine = Engine(
            self.scheduler, self, lambda: 1.0, pages=self if config.page_exchange else None
        )
        self.results: dict[tuple[str, int], Result] = {}  # by request id and choice
        self.plans: list[StepPlan] = []
        self.outputs: list[StepOutput] = []
        self._owners: dict[int, str] = {}  # request ids by sequence
        self._leaving: set[int] = set()  # sequences that ended or were preempted before this step
        self.steps = 0

    # ---- Clients

    def submit(self, request: Request) -> None:
        seed = self.engine.submit(request)
        for index in range(request.params.n):
            self.results[request.id, index] = Result(request, index, seed)

    def abort(self, request_id: str) -> None:
        for (owner, _), result in self.results.items():
            if owner == request_id and not result.finish:
                result.asked_to_end = FinishReason.ABORT
        self.engine.abort(request_id)

    def stop(self, request_id: str, index: int) -> None:
        """Stop a choice as a server does when its text met a stop string."""
        result = self.results[request_id, index]
        live = result.finish is None and result.asked_to_end is None
        event = self.engine.stop(request_id, index)
        assert (event is not None) == live
        if event is not None:
            result.asked_to_end = FinishReason.STOP
            self._record(event)

    # ---- Steps

    def request_ids(self, plan: StepPlan) -> list[str]:
        """Return the ids of the requests that a plan has chunks for."""
        return [self._owners[sequence] for lane in plan.lanes for sequence in lane.sequences]

    def step(self) -> list[TokenEvent]:
        """Run one step of the engine, and all checks; return its events."""
        for seq in (s for lane in self.scheduler.lanes for s in lane.running):
            waits = seq.waits_for_host or seq.constraint
            assert seq.streaming == (seq.runnable and seq.decoding and not waits)
        self._leaving = {
            s.id for lane in self.scheduler.lanes for s in lane.running if s.finish or s.preempted
        }
        busy = self.engine.has_work
        in_flight = self.engine._in_flight
        launched = len(self.plans)
        events = self.engine.step()
        self.steps += 1
        assert not busy or in_flight or events or len(self.plans) > launched, (
            "work, but nothing runs or was launched"
        )
        self.scheduler.check_invariants()
        check_published(self.scheduler, self.runner)
        for event in events:
            self._record(event)
        return events

    def run(self, limit: int = 3000) -> None:
        """Run steps until no work is left; every choice has ended then, and no page is held."""
        while self.engine.has_work:
            assert self.steps < limit, f"not done after {limit} steps: {self.unfinished}"
            self.step()
        assert not self.unfinished
        check_rest(self.scheduler)

    @property
    def unfinished(self) -> list[tuple[str, int]]:
        return [choice for choice, result in self.results.items() if not result.finish]

    def _record(self, event: TokenEvent) -> None:
        result = self.results[event.request_id, event.index]
        assert result.finish is None, f"an event of {event.request_id!r} after its end"
        assert event.tokens or event.prompt_logprobs or event.finish, "an empty event"
        assert event.embedding is None or event.finish
        is_first = bool(event.tokens) and not result.tokens
        assert (event.times is not None) == (is_first or event.finish is not None)
        result.tokens += event.tokens
        result.logprobs += event.logprobs or ()
        result.prompt_logprobs += event.prompt_logprobs or ()
        result.embedding = event.embedding
        result.finish = event.finish
        result.times = event.times
        if event.finish and not self.runner.executables_differ:
            self._check(result)

    def _check(self, result: Result) -> None:
        if self.config.embeds:
            check_embedding(result, self.runner.window)
        else:
            check_result(result, self.scheduler.max_tokens(result.request), self.runner.window)

    # ---- The engine's runner

    def launch(self, plan: StepPlan) -> tuple[str, StepOutput]:
        """Check the plan before the device gets it."""
        self.plans.append(plan)
        check_plan(plan, self.config)
        check_order(plan, self.scheduler)
        for index, lane in enumerate(plan.lanes):
            if self.config.deterministic:
                check_deterministic(plan.kind, lane, self.config)
            for sequence, row, start, size in zip(
                lane.sequences, lane.rows, lane.starts, lane.sizes, strict=True
            ):
                seq = self.scheduler.queue.sequences[sequence]
                assert not (self.config.deterministic and seq.times.preemptions)
                assert seq.id not in self._leaving, "a sequence that leaves is given another step"
                # The last token of an output is never computed.
                useful = seq.limit if seq.embeds else seq.limit - 1
                assert start + size <= useful, "more tokens than are of use"
                if plan.kind != "draft":
                    check_held(seq, start, size, self.runner)
                self._owners[seq.id] = seq.request.id
                result = self.results[seq.request.id, seq.index]
                result.cuts.append((plan.kind, start, size))
                result.spoilt |= self.runner.spoils(plan.number, index, row)
        return repr(plan), self.runner.launch(plan)

    def collect(self, plan: StepPlan, handle: tuple[str, StepOutput]) -> StepOutput:
        snapshot, output = handle
        assert repr(plan) == snapshot, "the plan was changed after its launch"
        self.outputs.append(self.runner.collect(plan, output))
        return self.outputs[-1]

    def close(self) -> None:
        self.runner.close()

    def read_pages(self, lane: int, group: int, ids: Seq[int]) -> PagesRead:
        """Read pages, after checking that they hold what the cache says."""
        check_published(self.scheduler, self.runner)
        return self.runner.read_pages(lane, group, ids)

    def check_segment(self, segment: KVSegment) -> None:
        self.runner.check_segment(segment)

    def upload_pages(self, group: int, arrays: Mapping[str, np.ndarray]) -> list[Slot]:
        return self.runner.upload_pages(group, arrays)

    def move_pages(self, group: int, read: PagesRead) -> list[Slot]:
        return self.runner.move_pages(group, read)

    def write_pages(self, lane: int, group: int, ids: Seq[int], uploaded: list[Slot]) -> None:
        self.runner.write_pages(lane, group, ids, uploaded)
