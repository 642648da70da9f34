"""Checks of every plan, of the cache against the device's memory, and of what clients got."""

import dataclasses
import json
from dataclasses import dataclass, field

from jaxserve.config import EngineConfig, SlotPool
from jaxserve.config.kv_policy import NO_PAGE
from jaxserve.engine.buckets import BucketPlan, choose
from jaxserve.engine.events import Finish, FinishReason, Logprob, Times
from jaxserve.engine.host.scheduler import Scheduler
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.plan import FED_BACK, LanePlan, StepKind, StepPlan
from jaxserve.request import Request
from jaxserve.structure import Matcher
from tests.fake_model import naive, naive_embedding, window_of
from tests.fake_runner import FakeRunner

Cut = tuple[StepKind, int, int]  # kind of step, start, size


@dataclass
class Result:
    """Everything that a client saw of one choice, and how its tokens were cut into steps."""

    request: Request
    index: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    embedding: list[float] | None = None
    finish: Finish | None = None
    times: Times | None = None
    asked_to_end: FinishReason | None = None
    spoilt: bool = False
    cuts: list[Cut] = field(default_factory=list)


def expected_output(
    request: Request, index: int, seed: int, max_tokens: int, window: int | None
) -> tuple[list[int], Finish]:
    """Return all tokens of a choice that is not ended from outside, and why it ends."""
    tokens = naive(request, index, seed, max_tokens, window)
    for n, token in enumerate(tokens):
        if token in request.end_ids and n >= request.params.min_tokens:
            return tokens[: n + 1], Finish(FinishReason.STOP, stopped_by=token)
    if request.grammar and advance(request.grammar.matcher(), tokens).ended:
        return tokens, Finish(FinishReason.STOP)
    return tokens, Finish(FinishReason.LENGTH)


def advance(matcher: Matcher, tokens: list[int]) -> Matcher:
    """Let the matcher accept all of these tokens, and return it."""
    assert all(map(matcher.accept, tokens))
    return matcher


def check_result(result: Result, max_tokens: int, window: int | None) -> None:
    """Check a choice against the naive loop: its end, and its tokens.

    A choice that was ended from outside has the first of them.
    """
    finish = result.finish
    assert finish is not None
    tokens, end = expected_output(result.request, result.index, result.seed, max_tokens, window)
    whole = finish == end and not result.asked_to_end
    if result.asked_to_end:
        assert finish == Finish(result.asked_to_end)
    elif finish.reason == FinishReason.ERROR:
        assert result.spoilt and finish.error is not None and not whole
    else:
        assert whole, f"ended with {finish} instead of {end}"
    expected = tokens if whole else tokens[: len(result.tokens)]
    assert result.tokens == expected, f"{result.tokens} instead of {expected}"
    _check_logprobs(result, whole)


def check_embedding(result: Result, window: int | None) -> None:
    """Check an embedding against the naive one; a choice that failed or was ended has none."""
    finish = result.finish
    assert finish is not None and not result.tokens
    if result.asked_to_end:
        assert finish == Finish(result.asked_to_end) and result.embedding is None
    elif finish.reason == FinishReason.ERROR:
        assert result.spoilt and finish.error is not None and result.embedding is None
    else:
        assert finish == Finish(FinishReason.STOP)
        assert result.embedding == naive_embedding(result.request.prompt, window)


def _check_logprobs(result: Result, whole: bool) -> None:
    prompt = result.request.prompt
    params = result.request.params
    chosen = [Logprob(t, -float(len(prompt) - 1 + n), ()) for n, t in enumerate(result.tokens)]
    assert result.logprobs == (chosen if params.logprobs is not None else [])
    wanted = params.prompt_logprobs is not None and result.index == 0
    scores = [Logprob(t, -float(p), ()) for p, t in enumerate(prompt[1:])] if wanted else []
    assert result.prompt_logprobs == (
        scores if whole or result.tokens else scores[: len(result.prompt_logprobs)]
    )


def check_plan(plan: StepPlan, config: EngineConfig) -> None:
    """Check that columns fit together, and that the step fits the budget and a bucket."""
    json.dumps(dataclasses.asdict(plan), default=bytes.hex)  # TypeError unless plain data
    assert (
        len(plan.lanes) == config.lanes and 0 < plan.num_tokens <= config.step_tokens * plan.steps
    )
    assert plan.steps in (1, config.decode_steps) and (plan.steps == 1 or plan.kind == "decode")
    assert (plan.kind == "embed") == config.embeds
    bucket = choose(
        BucketPlan.of(config).buckets, plan.kind, plan.num_rows, plan.num_tokens, plan.steps
    )
    for lane in plan.lanes:
        assert (
            len(
                {len(c) for c in (lane.sequences, lane.rows, lane.starts, lane.sizes, lane.samples)}
            )
            == 1
        )
        assert sum(lane.sizes) == len(lane.tokens) == len(lane.targets)
        assert min(lane.sizes, default=1) > 0
        assert plan.kind == "decode" or lane.sizes == sorted(lane.sizes, key=lambda size: size != 1)
        assert max(lane.sizes, default=1) <= plan.steps or plan.kind != "decode"
        for group in range(len(config.pools)):
            assert sum(fresh[0] == group for fresh in lane.fresh) <= bucket.fresh_pages(
                config.page_size
            )


def check_deterministic(kind: StepKind, lane: LanePlan, config: EngineConfig) -> None:
    """Check that the step is not mixed and that its chunks are cut at borders only.

    Pages are all taken at admission, but where a window slides.
    """
    border = config.chunk_border
    slides = [pool.window is not None or isinstance(pool, SlotPool) for pool in config.pools]
    assert all(slides[group] for group, *_ in lane.fresh)
    assert all((token == FED_BACK) == (kind == "decode") for token in lane.tokens), "mixed"
    for start, size in zip(lane.starts, lane.sizes, strict=True):
        assert kind == "decode" or start % border == 0, f"a chunk begins at {start}"
        assert size <= (1 if kind == "decode" else border)


def check_order(plan: StepPlan, scheduler: Scheduler) -> None:
    """Check that no waiting sequence is overtaken by one of lower rank of the same client.

    Nor by one of another client with a lower priority. A sequence that waits for its leader may be.
    """
    entered = {(a.lane, a.row) for a in plan.admissions}
    admitted = [
        s for lane in scheduler.lanes for s in lane.running if (lane.index, s.row) in entered
    ]
    for seq in scheduler.waiting:
        if not scheduler.rows.waits_for_leader(seq):
            first = [s for s in admitted if s.request.client == seq.request.client]
            assert all(s.rank < seq.rank for s in first), f"sequence {seq.id} was overtaken"
            assert all(s.request.priority <= seq.request.priority for s in admitted)


def check_held(seq: Sequence, start: int, size: int, runner: FakeRunner) -> None:
    """Check that the sequence holds every page and slot that a chunk reads or writes.

    The device finds pages that were given back as they were until others have written to them.
    """
    page_size = runner.config.page_size
    for number, (group, table) in enumerate(zip(runner.groups, seq.pages, strict=True)):
        positions = range(window_of(group.window, start).start, start + size)
        entries = {position // page_size for position in positions}
        if group.slot:
            # The slot that a chunk reads is the one that it writes, or is kept. That one is the
            # next that the table names: entries before it are passed in the same slot.
            entry = (start + size - 1) // page_size
            entries = {next((i for i in range(entry, len(table)) if table[i] != NO_PAGE), entry)}
        assert all(i < len(table) and table[i] != NO_PAGE for i in entries), (
            f"the chunk from {start} on needs entries {sorted(entries)} of group {number}, "
            f"whose table is {table}"
        )


def check_published(scheduler: Scheduler, runner: FakeRunner) -> None:
    """Check that every page that can be found holds on the device what the cache promises."""
    for lane, device in zip(scheduler.lanes, runner.lanes, strict=True):
        groups = zip(lane.caches, device.groups, device.pages, strict=True)
        for cache, group, pages in groups:
            for entry in cache._entries.values():
                slots = pages[entry.page]
                if group.slot:
                    assert [slot[0] for slot in slots] == list(range(len(slots)))
                    slots = slots[-cache.page_size :]
                assert tuple(slot[1] for slot in slots) == entry.tokens, (
                    f"page {entry.page} is not as published"
                )
                assert all(slot[2] == slot[2] for slot in slots), f"page {entry.page} is not finite"
                assert [slot[0] - slots[0][0] for slot in slots] == list(range(cache.page_size))


def check_rest(scheduler: Scheduler) -> None:
    """Check that an engine without work holds nothing."""
    scheduler.check_invariants()
    assert (
        not scheduler.has_work
        and not scheduler.waiting
        and not scheduler.queue.requests
        and not scheduler.queue.sequences
    )
    for lane in scheduler.lanes:
        assert not lane.running and len(lane._free_rows) == scheduler.config.max_batch
        assert all(cache.pool.available == cache.pool.num_pages for cache in lane.caches)
