"""Modes of the scheduler in single situations: drafts, decodes as one, deterministic bits."""

import dataclasses

from jaxserve.engine.host.scheduler import Scheduler
from tests.fake_model import naive
from tests.fake_runner import FakeRunner
from tests.jaxserve.engine.host.driver import PROMPT, Driver, ScriptedProposer, config_of, request

# ---- Speculation


def test_drafts_are_verified_and_cut_at_the_first_wrong_one() -> None:
    driver = Driver(config_of(), proposer=ScriptedProposer())
    driver.submit(request(salt="w", max_tokens=12))
    driver.run()
    sizes = [size for _, start, size in driver.results["a", 0].cuts if start >= 10]
    assert max(sizes) > 1 and len(sizes) < 12


def test_accepted_drafts_after_an_end_token_are_not_published() -> None:
    """Pages behind an end are written, but they must not be found."""
    source = request(prompt=(5,), salt="w", max_tokens=12)
    for end in naive(source, 0, 1, 12)[:8]:
        driver = Driver(config_of(page_size=1), proposer=ScriptedProposer())
        driver.submit(dataclasses.replace(source, eos_ids=(end,)))
        driver.run()
        assert len(driver.scheduler.lanes[0].caches[0]) <= 1 + len(driver.results["a", 0].tokens)


def test_drafts_do_not_preempt() -> None:
    """The plain request ends before the other needs its pages; every draft is wrong."""
    driver = Driver(
        config_of(page_size=1, num_pages=17, prefix_cache=False),
        proposer=ScriptedProposer(wrong_every=1),
    )
    driver.submit(request("drafts", prompt=(1, 2, 3, 4), salt="w", max_tokens=13))
    driver.submit(request("plain", prompt=(5, 6, 7, 8), max_tokens=7))
    driver.run()
    assert any(size > 1 for _, start, size in driver.results["drafts", 0].cuts if start)
    assert [len(plan.admissions) for plan in driver.plans if plan.admissions] == [2]


# ---- Several decodes as one


def test_decodes_are_launched_together_while_nobody_waits() -> None:
    """Twelve tokens are one of the prompt's step, twice four, and the last three one by one."""
    driver = Driver(config_of(decode_steps=4))
    driver.submit(request(max_tokens=12))
    driver.run()
    assert [plan.steps for plan in driver.plans] == [1, 4, 4, 1, 1, 1]
    assert [cut[1:] for cut in driver.results["a", 0].cuts] == [
        (0, 10),
        (10, 4),
        (14, 4),
        (18, 1),
        (19, 1),
        (20, 1),
    ]


def test_a_row_takes_no_more_of_them_than_it_has_tokens_left() -> None:
    driver = Driver(config_of(decode_steps=4))
    driver.submit(request("long", prompt=(1, 2), max_tokens=9))
    driver.submit(request("short", prompt=(3, 4), max_tokens=3))
    driver.run()
    together = [plan.lanes[0].sizes for plan in driver.plans if plan.steps > 1]
    assert together == [[4, 2], [4]]


def test_a_request_that_arrives_waits_only_for_what_is_launched() -> None:
    driver = Driver(config_of(decode_steps=4))
    driver.submit(request("a", max_tokens=40))
    for _ in range(4):
        driver.step()
    driver.submit(request("b", prompt=tuple(range(30)), max_tokens=20))  # two steps of 16 tokens
    for _ in range(5):
        driver.step()
    assert [plan.steps for plan in driver.plans] == [1, 4, 4, 4, 1, 1, 4, 4, 4]
    driver.run()


def test_an_end_among_them_ends_the_row_at_once() -> None:
    """No token is made after the end; results of the launch in flight are dropped."""
    tokens = naive(request(max_tokens=12), 0, 1, 12)
    driver = Driver(config_of(decode_steps=4))
    driver.submit(dataclasses.replace(request(max_tokens=12), eos_ids=(tokens[2],)))
    driver.run()
    assert driver.results["a", 0].tokens == tokens[:3]
    assert [plan.steps for plan in driver.plans] == [1, 4, 4]
    assert len(driver.outputs[1].lanes[0].tokens[0]) == 2, "the device went on after the end"


def test_good_tokens_before_one_that_is_not_finite_are_delivered() -> None:
    """The fake's third launch (the second of four decodes) is spoilt in its fourth decode."""
    driver = Driver(config_of(decode_steps=4), spoils=lambda number, lane, row: number == 3)
    driver.submit(request(max_tokens=20))
    driver.run()
    result = driver.results["a", 0]
    assert [plan.steps for plan in driver.plans] == [1, 4, 4, 4]
    assert (
        result.finish is not None
        and result.finish.error is not None
        and "after 18 tokens" in str(result.finish.error)
    )
    assert result.tokens == naive(request(max_tokens=20), 0, 1, 8)


def test_a_deadline_that_lies_inside_has_single_steps() -> None:
    """Launches of several decodes take 10 s here, and one is in flight: 20 s are kept free."""
    scheduler = Scheduler(config_of(decode_steps=4))
    now = 0.0
    steps = []
    runner = FakeRunner(scheduler.config)
    timed = dataclasses.replace(request(max_tokens=40), deadline=55.0)
    scheduler.submit(timed, 1, now)
    while plan := scheduler.plan(now):
        scheduler.commit(plan, runner.collect(plan, runner.launch(plan)), now)
        steps.append((now, plan.steps))
        now += 10.0 if plan.steps > 1 else 1.0
    assert steps[:5] == [(0, 1), (1, 4), (11, 4), (21, 4), (31, 4)]
    assert {several for began, several in steps if began > 35} == {1}


def test_a_sequence_that_waits_for_the_host_has_single_steps() -> None:
    driver = Driver(config_of(decode_steps=4), proposer=ScriptedProposer())
    driver.submit(request("plain", max_tokens=20))
    driver.submit(request("drafts", salt="w", max_tokens=6))
    driver.run()
    together = [plan.steps > 1 for plan in driver.plans]
    last = max(n for n, plan in enumerate(driver.plans) if "drafts" in driver.request_ids(plan))
    assert not any(together[: last + 1]) and any(together[last + 1 :])


def test_a_request_that_waits_for_a_row_does_not_slow_down_the_others() -> None:
    driver = Driver(config_of(decode_steps=4, max_batch=1))
    driver.submit(request("a", max_tokens=21))
    driver.submit(request("b", max_tokens=5))
    driver.run()
    assert sum(plan.steps > 1 for plan in driver.plans) == 6


def test_decodes_as_one_are_not_worth_a_preemption() -> None:
    """The pool has pages for one more token of each request, but not for four."""
    driver = Driver(config_of(decode_steps=4, page_size=2, num_pages=11, prefix_cache=False))
    driver.submit(request("a", prompt=(1, 2, 3), max_tokens=9))
    driver.submit(request("b", prompt=(4, 5, 6), max_tokens=9))
    driver.run()
    steps = [plan.steps for plan in driver.plans]
    assert steps[:2] == [1, 4] and 1 in steps[2:]
    assert all(result.times.preemptions == 0 for result in driver.results.values() if result.times)


# ---- Deterministic


def test_deterministic_engines_reserve_and_cut_at_borders() -> None:
    driver = Driver(config_of(deterministic=True, step_tokens=32))  # chunk_border 8
    driver.submit(request("a", prompt=tuple(range(19)), max_tokens=6))
    driver.run()
    assert driver.results["a", 0].cuts[:3] == [
        ("prefill", 0, 8),
        ("prefill", 8, 8),
        ("prefill", 16, 3),
    ]
    (admission,) = driver.plans[0].admissions
    assert len(admission.tables[0]) == 7  # 25 tokens in pages of 4
    driver.submit(request("b", prompt=(*range(13), 50, 51), max_tokens=1))
    driver.run()
    # 12 tokens are in full pages; the hit is cut down to the border.
    assert driver.results["b", 0].cuts == [("prefill", 8, 7)]


def test_deterministic_engines_admit_into_a_window_what_it_holds_at_its_most() -> None:
    """With pages of 2 and a window of 6, 14 tokens hold four pages at a time; six may be."""
    config = config_of(deterministic=True, page_size=2, step_tokens=8, windows=(6,), num_pages=10)
    assert config.policies[0].held(14) == 6
    driver = Driver(config)
    for name in "abc":
        driver.submit(request(name, prompt=(1, 2), max_tokens=12))
    driver.run()
    assert [len(plan.admissions) for plan in driver.plans if plan.admissions] == [1, 1, 1]


def test_deterministic_engines_take_prompts_longer_than_a_window_s_pool() -> None:
    config = config_of(
        deterministic=True, page_size=2, num_pages=10, windows=(5,), step_tokens=6, max_batch=1
    )
    driver = Driver(config)
    driver.submit(request(prompt=tuple(range(50)), max_tokens=8))
    driver.run()
    assert driver.results["a", 0].finish


def test_deterministic_engines_publish_no_pages_of_decode_steps() -> None:
    """A prompt that contains an earlier output computes the output's positions by prefill."""
    driver = Driver(config_of(deterministic=True, step_tokens=16))  # chunk_border 4
    driver.submit(request("a", prompt=PROMPT[:6], max_tokens=8))
    driver.run()
    driver.submit(request("b", prompt=(*PROMPT[:6], *driver.results["a", 0].tokens)))
    driver.run()
    assert driver.results["b", 0].cuts[0] == ("prefill", 4, 4)


def test_deterministic_engines_do_not_draft() -> None:
    driver = Driver(config_of(deterministic=True), proposer=ScriptedProposer())
    driver.submit(request(salt="w", max_tokens=12))
    driver.run()
    assert all(size == 1 for kind, start, size in driver.results["a", 0].cuts if start >= 10)


def test_deterministic_scores_come_from_the_same_steps_whatever_runs_beside_them() -> None:
    """The last chunk, of one token, is scored whether or not the one before was read by then."""
    cuts = []
    for others in (0, 1):
        driver = Driver(config_of(deterministic=True, step_tokens=16))  # chunk_border 4
        for number in range(others):
            driver.submit(request(f"other {number}", max_tokens=20))
            driver.step()
        driver.submit(request("scored", prompt=tuple(range(40, 49)), prompt_logprobs=0))
        driver.run()
        cuts.append(driver.results["scored", 0].cuts[:3])
    assert cuts[0] == cuts[1] == [("score", 0, 4), ("score", 4, 4), ("score", 8, 1)]


def test_deterministic_engines_publish_no_pages_of_score_steps() -> None:
    """Pages of another executable would have other bits than a request's own prefill."""
    driver = Driver(config_of(deterministic=True, step_tokens=16))
    driver.submit(request("scored", prompt_logprobs=0))
    driver.run()
    driver.submit(request("plain"))
    driver.run()
    assert driver.results["plain", 0].cuts[0] == ("prefill", 0, 4)
