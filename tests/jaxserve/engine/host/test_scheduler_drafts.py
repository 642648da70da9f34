"""Drafts that the device makes.

The host runs ahead with upper bounds of lengths, and keeps the draft model's pages caught up.
"""

import dataclasses
import random

import pytest

from jaxserve.config import EngineOptions, resolve
from jaxserve.engine.buckets import BucketPlan
from jaxserve.engine.plan import DRAFTED, FED_BACK
from jaxserve.errors import ConfigError
from tests.fake_model import VOCAB
from tests.jaxserve.engine.host.driver import Driver, ScriptedSpeculation, config_of, request


def drafting_driver(max_drafts: int = 3, **changes: int) -> Driver:
    return Driver(config_of(**changes), speculation=ScriptedSpeculation(max_drafts))


def step_kinds(d: Driver) -> list[str]:
    return [plan.kind for plan in d.plans]


def test_a_prompt_is_caught_up_before_its_first_draft() -> None:
    d = drafting_driver()
    d.submit(request(salt="w", max_tokens=12))
    d.run()
    chunks = [lane for plan in d.plans if plan.kind == "draft" for lane in plan.lanes]
    assert chunks[0].starts[0] == 0 and chunks[0].tokens[:10] == list(request().prompt)
    caught_up = step_kinds(d).index("draft")
    assert "verify" not in step_kinds(d)[:caught_up] and "verify" in step_kinds(d)[caught_up:]
    assert all(lane.samples == [0] * len(lane.rows) for lane in chunks)


def test_a_verification_is_launched_while_another_is_unread() -> None:
    """The host knows an upper bound of the row's length, and the device knows its length."""
    d = drafting_driver()
    d.submit(request(salt="w", max_tokens=30))
    ahead = 0
    while d.engine.has_work:
        in_flight = d.engine._in_flight
        launched = len(d.plans)
        d.step()
        if in_flight and in_flight[0].kind == "verify" and len(d.plans) > launched:
            ahead += d.plans[-1].kind == "verify"
    assert ahead > 3
    verified = [lane for plan in d.plans if plan.kind == "verify" for lane in plan.lanes]
    assert all(lane.tokens == [FED_BACK] + [DRAFTED] * (lane.samples[0] - 1) for lane in verified)


def test_a_queue_that_lacks_pages_does_not_stop_drafting() -> None:
    """Both requests would find a row, but only one finds pages: no prompt is due."""
    d = drafting_driver(num_pages=5)
    for name, first in (("a", 1), ("b", 2)):
        d.submit(request(name, prompt=tuple(range(first, first + 10)), salt="w", max_tokens=10))
    verified = 0
    while d.engine.scheduler.waiting:
        d.step()
        verified += d.plans[-1].kind == "verify"
    assert verified > 1
    d.run()


def test_requests_that_draft_nothing_never_wait_for_a_draft_model() -> None:
    d = drafting_driver()
    for name in "abc":
        d.submit(request(name, max_tokens=12))
    d.run()
    assert {"draft", "verify"}.isdisjoint(step_kinds(d))


def test_a_long_prompt_is_caught_up_in_every_other_step() -> None:
    """A stream beside the long prompt waits for one chunk at a time."""
    d = drafting_driver(step_tokens=4, num_pages=64)
    d.submit(request("stream", max_tokens=40))
    d.submit(request("long", prompt=tuple(range(1, 30)), salt="w", max_tokens=12))
    d.run()
    pairs = list(zip(step_kinds(d), step_kinds(d)[1:], strict=False))
    assert ("draft", "draft") not in pairs and step_kinds(d).count("draft") > 29 // 4


def test_choices_that_share_a_prompt_are_caught_up_one_after_the_other() -> None:
    """Rows of a step never write a page that another row reads or writes.

    The fake device asserts that. Later choices find the shared pages filled: two of four tokens
    each, of a prompt of ten.
    """
    d = drafting_driver(num_pages=64, step_tokens=64)
    d.submit(request(salt="w", n=4, max_tokens=12))
    d.run()
    begun: dict[int, int] = {}
    for lane in (lane for plan in d.plans if plan.kind == "draft" for lane in plan.lanes):
        for sequence, start in zip(lane.sequences, lane.starts, strict=True):
            begun.setdefault(sequence, start)
    assert begun == {0: 0, 1: 8, 2: 8, 3: 8}


def test_a_cached_prompt_is_not_caught_up_again() -> None:
    d = drafting_driver()
    for name in "ab":
        d.submit(request(name, salt="w", max_tokens=12))
        d.run()
    second = [plan for plan in d.plans if plan.kind == "draft" and d.request_ids(plan) == ["b"]]
    assert min(lane.starts[0] for plan in second for lane in plan.lanes) == 8


def test_a_model_whose_every_layer_has_a_window_is_refused() -> None:
    """A draft model uses the page tables of a group without a window."""
    options = EngineOptions(speculate="draft")
    with pytest.raises(ConfigError, match="every layer of the model has one"):
        resolve(options, max_positions=64, lanes=1, affordable_tokens=1000, windows=(5, 9))
    assert (
        resolve(
            options, max_positions=64, lanes=1, affordable_tokens=1000, windows=(5, None)
        ).full_group
        == 1
    )


def test_what_a_draft_model_lacks_always_has_a_compiled_step() -> None:
    config = dataclasses.replace(
        config_of(max_batch=4, step_tokens=300), speculate="draft", draft_tokens=3
    )
    plan = BucketPlan.of(config)
    assert [b.tokens for b in plan.buckets if b.kind == "draft"] == [16, 64, 256, 300]
    reachable = plan.reachable([(20, 10)], config=config, score=False)
    assert [str(b) for b in reachable if b.kind in ("verify", "draft")] == [
        "verify[1 x 1]",
        "verify[1 x 3]",
        "draft[4x16]",
        "draft[4x64]",
    ]


@pytest.mark.parametrize("seed", range(40))
def test_busy_traffic(seed: int) -> None:
    """Prompts are shared, pages few, and ends come at any time; every step is checked."""
    draw = random.Random(seed)
    windows = draw.choice([(None,), (None,), (None, 5), (6, None)])
    d = drafting_driver(
        draw.randrange(1, 8),
        num_pages=draw.choice([20, 30, 60]),
        page_size=draw.choice([1, 2, 3, 4]),
        step_tokens=draw.choice([5, 16, 40]),
        decode_steps=draw.choice([1, 1, 3]),
        lanes=draw.choice([1, 1, 2]),
        windows=windows,
    )
    ends = tuple(range(3, VOCAB, 19))
    base = [draw.randrange(VOCAB) for _ in range(9)]
    for number in range(14):
        prompt = (
            *base[: draw.randrange(1, 10)],
            *(draw.randrange(4) for _ in range(draw.randrange(3))),
        )
        n = draw.choice([1, 1, 2, 4])
        tokens = draw.randrange(1, 16)
        salt = draw.choice("wwx")
        if len(prompt) + tokens <= d.config.capacity:
            stop = ends if draw.random() < 0.5 else ()
            d.submit(
                request(
                    str(number),
                    prompt,
                    salt=salt,
                    n=n,
                    max_tokens=tokens,
                    seed=number,
                    stop_token_ids=stop,
                )
            )
        for _ in range(draw.randrange(8)):
            d.step()
        if draw.random() < 0.15:
            d.abort(str(draw.randrange(number + 1)))
    d.run()
    assert "draft" in step_kinds(d)
