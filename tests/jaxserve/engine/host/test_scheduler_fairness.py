"""Fairness under load that never ends: every request is served, and streams keep streaming."""

import random
from itertools import pairwise
from typing import Any

import pytest

from jaxserve.config import EngineOptions, resolve
from jaxserve.request import Request
from tests.jaxserve.engine.host.driver import PROMPT, Driver, ScriptedProposer, config_of, request

STEPS = 120


class SteadyLoad:
    """An engine of random shape in which a request always waits.

    A few kinds of requests come again and again.
    """

    def __init__(self, seed: int, deterministic: bool):
        self.draw = random.Random(seed)
        draw = self.draw
        page_size = draw.randint(1, 4)
        max_batch = draw.randint(1, 8)
        options = EngineOptions(
            max_batch=max_batch,
            step_tokens=draw.randint(max(4, max_batch), 16),
            page_size=page_size,
            cache_tokens=draw.randint(8, 40),
            max_context=24,
            prefix_cache=draw.random() < 0.5,
            deterministic=deterministic,
        )
        config = resolve(
            options, max_positions=40, lanes=draw.choice((1, 1, 2)), affordable_tokens=100
        )
        proposer = ScriptedProposer(draw.choice((1, 4))) if draw.random() < 0.5 else None
        self.driver = Driver(config, proposer=proposer)
        self.max_length = min(config.max_context, config.capacity)
        self.request_kinds = [self._draw_request() for _ in range(draw.randint(1, 4))]
        self.oldest = -1
        self.age = 0

    def _draw_request(self) -> dict[str, Any]:
        length = self.draw.randint(1, self.max_length - 1)
        return {
            "prompt": tuple(range(length)),
            "max_tokens": self.draw.randint(1, min(8, self.max_length - length)),
            "n": self.draw.choice((1, 1, 2)),
            "salt": self.draw.choice(("", "w")),
            "prompt_logprobs": self.draw.choice((None, None, 0)),
        }

    def step(self) -> None:
        driver = self.driver
        while len(driver.scheduler.waiting) < self.draw.choice((1, 3, 8)):
            driver.submit(request(str(len(driver.results)), **self.draw.choice(self.request_kinds)))
        driver.step()
        oldest = min(driver.scheduler.queue.sequences, default=-1)
        self.age = self.age + 1 if oldest == self.oldest else 0
        self.oldest = oldest

    @property
    def patience(self) -> int:
        """Return the steps that the oldest sequence may take.

        Three turns for each of its tokens, and some for steps in flight.
        """
        seq = self.driver.scheduler.queue.sequences.get(self.oldest)
        return 3 * (seq.prompt_len + seq.max_tokens + 6) if seq else 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_oldest_is_served_whatever_keeps_coming(seed: int, deterministic: bool) -> None:
    load = SteadyLoad(seed, deterministic)
    for _ in range(STEPS):
        load.step()
        assert load.age <= load.patience, f"sequence {load.oldest} has waited for {load.age} steps"
    load.driver.run()


def late_request(driver: Driver, **changes: Any) -> Request:
    """Return a request named by the step, of one prompt token unless `changes` say otherwise."""
    return request(f"late {driver.steps}", **{"prompt": (1,), "max_tokens": 1} | changes)


def test_a_blocked_prompt_is_not_starved_by_later_ones() -> None:
    """The second chunk of "a" lacks a page, since two streams grow; short requests never end."""
    driver = Driver(
        config_of(max_batch=8, step_tokens=8, page_size=1, num_pages=15, prefix_cache=False)
    )
    driver.submit(request("s1", prompt=(1,)))
    driver.submit(request("s2", prompt=(1,)))
    driver.submit(request("a", prompt=tuple(range(12)), max_tokens=1))
    while driver.steps < 200 and not driver.results["a", 0].finish:
        driver.submit(late_request(driver, max_tokens=4))
        driver.step()
    assert driver.results["a", 0].finish, "still waits for one page after 200 steps"


def test_a_stream_that_needs_no_page_is_not_held_up_by_a_prompt_that_did() -> None:
    driver = Driver(
        config_of(max_batch=3, step_tokens=5, page_size=4, num_pages=5, prefix_cache=False)
    )
    driver.submit(request("stream", prompt=(1,), max_tokens=12))
    for name, length, max_tokens in (("short", 1, 5), ("shorter", 2, 2), ("long", 10, 2)):
        driver.submit(request(name, prompt=tuple(range(length)), max_tokens=max_tokens))
    driver.run()
    assert steps_without(driver, "stream") == []


def test_drafts_do_not_take_the_budget_of_other_streams() -> None:
    driver = Driver(
        config_of(max_batch=3, step_tokens=3, prefix_cache=False), proposer=ScriptedProposer()
    )
    for name, salt in (("d1", "w"), ("d2", "w"), ("plain", "")):
        driver.submit(request(name, prompt=(1,), salt=salt, max_tokens=20))
    driver.run()
    assert steps_without(driver, "plain") == []


def steps_without(driver: Driver, name: str) -> list[int]:
    """Return the steps between a request's first and last that have no chunk of it."""
    served = [n for n, plan in enumerate(driver.plans) if name in driver.request_ids(plan)]
    assert len(served) == len(driver.results[name, 0].cuts)
    return [n for before, after in pairwise(served) for n in range(before + 1, after)]


# ---- Deterministic: prompts, scores and decodes take turns


def test_deterministic_scores_are_admitted_while_prompts_keep_coming() -> None:
    driver = Driver(config_of(deterministic=True, max_batch=2))
    driver.submit(request("first", max_tokens=2))
    driver.submit(request("scored", prompt_logprobs=0))
    while driver.steps < 100 and not driver.results["scored", 0].finish:
        driver.submit(late_request(driver, prompt=PROMPT, max_tokens=2))
        driver.step()
    assert driver.results["scored", 0].finish, "still waits after 100 steps"


def test_deterministic_scores_go_on_while_prompts_keep_coming() -> None:
    """Four chunks are to be scored beside a stream, and every prefill step finds a new prompt."""
    driver = Driver(config_of(deterministic=True))
    driver.submit(request("stream", max_tokens=50))
    driver.submit(request("scored", prompt=tuple(range(13)), prompt_logprobs=0))
    while driver.steps < 60 and not driver.results["scored", 0].finish:
        driver.submit(late_request(driver))
        driver.step()
    assert driver.results["scored", 0].finish, f"after 60 steps {driver.results['scored', 0].cuts}"


@pytest.mark.parametrize("scores", [None, 0])
def test_deterministic_decodes_and_prompts_take_turns(scores: int | None) -> None:
    """A stream gets a token at least every other step while prompts keep coming."""
    driver = Driver(config_of(deterministic=True))
    driver.submit(request("stream", max_tokens=30))
    while not driver.results["stream", 0].finish:
        driver.submit(late_request(driver, prompt=PROMPT, prompt_logprobs=scores))
        driver.step()
    kinds = [plan.kind for plan in driver.plans]
    streaming = kinds[kinds.index("decode") : len(kinds) - kinds[::-1].index("decode")]
    assert all("decode" in pair for pair in pairwise(streaming))


def test_deterministic_scores_and_prompts_take_turns() -> None:
    """While prompts of both kinds wait, none comes twice in a row."""
    driver = Driver(config_of(deterministic=True, max_batch=2, prefix_cache=False))
    for name in range(4):
        driver.submit(request(f"plain {name}", max_tokens=1))
        driver.submit(request(f"scored {name}", max_tokens=1, prompt_logprobs=0))
    driver.run()
    kinds = [plan.kind for plan in driver.plans if plan.kind != "decode"]
    assert kinds[:4] in (["prefill", "score"] * 2, ["score", "prefill"] * 2)
