"""Pages of a scheduler in single situations: preemption, eviction and sliding windows."""

import dataclasses

import pytest

from jaxserve.config import Pool
from jaxserve.config.kv_policy import NO_PAGE
from tests.fake_model import naive
from tests.jaxserve.engine.host.driver import PROMPT, Driver, ScriptedProposer, config_of, request


def test_out_of_pages_the_last_in_rank_starts_over_from_what_is_cached() -> None:
    driver = Driver(config_of(page_size=2, num_pages=8, max_context=16))
    driver.submit(request("a", prompt=PROMPT[:4], max_tokens=8, repetition_penalty=2.0))
    driver.submit(request("b", prompt=PROMPT[4:8], max_tokens=8, repetition_penalty=2.0))
    driver.run()
    back = [a for plan in driver.plans for a in plan.admissions][2:]
    assert back and all(a.prompt_tokens == 4 for a in back)
    written = naive(driver.results["b", 0].request, 0, 1, 8)
    assert back[0].history == (*PROMPT[4:8], *written[: len(back[0].history or ()) - 4])
    assert len(back[0].history or ()) > 4


def test_the_last_in_rank_gives_way_first_and_the_first_never() -> None:
    driver = Driver(config_of(page_size=1, num_pages=12, max_context=12, prefix_cache=False))
    for name, length, priority in (("last", 4, 1), ("first", 3, -1), ("second", 2, 0)):
        driver.submit(request(name, prompt=PROMPT[:length], priority=priority, max_tokens=8))
    queues: list[list[str]] = []
    while driver.engine.has_work:
        driver.step()
        queues.append([seq.request.id for seq in driver.scheduler.waiting])
    assert [queue for queue in queues if queue][:2] == [["last"], ["last"]]
    assert ["second", "last"] in queues and not any("first" in queue for queue in queues)


@pytest.mark.parametrize("pages", [8, 9, 10, 11])
def test_a_sequence_that_waits_for_the_host_keeps_its_rank(pages: int) -> None:
    driver = Driver(
        config_of(page_size=1, num_pages=pages, prefix_cache=False),
        proposer=ScriptedProposer(max_drafts=0),
    )
    driver.submit(request("first", prompt=(1,), salt="w", max_tokens=7))
    driver.submit(request("last", prompt=(1,), max_tokens=7))
    driver.run()
    assert driver.results["first", 0].cuts == [("prefill", 0, 1)] + [
        ("decode", n, 1) for n in range(1, 7)
    ]


def test_what_was_evicted_while_it_was_preempted_is_published_again() -> None:
    driver = Driver(config_of(page_size=2, num_pages=8, max_context=16))
    driver.submit(request("a", prompt=PROMPT[:4], max_tokens=8))
    driver.submit(request("b", prompt=PROMPT[4:9], max_tokens=8))
    while not any(seq.times.preemptions for seq in driver.scheduler.waiting):
        driver.step()
    driver.scheduler.flush_cache()
    driver.run()
    driver.submit(request("like b", prompt=PROMPT[4:9]))
    driver.run()
    assert driver.results["like b", 0].cuts[0] == ("prefill", 4, 1)


def test_idle_pages_that_a_prefix_is_in_do_not_count_as_room_for_the_rest() -> None:
    driver = Driver(config_of(num_pages=4, max_context=16))
    driver.submit(request("before", prompt=PROMPT[:8], max_tokens=1))
    driver.run()  # two pages idle, two free
    driver.submit(request("one page", prompt=(1,), max_tokens=3))
    driver.submit(request("after", prompt=(*PROMPT[:8], 1, 2, 3, 4), max_tokens=1))
    driver.run()
    begun = [[a.length for a in plan.admissions] for plan in driver.plans if plan.admissions]
    assert begun == [[0], [0], [8]], "two more pages are needed, and one is free"


def test_scores_of_a_prompt_that_starts_over_are_reported_once() -> None:
    driver = Driver(config_of(page_size=1, num_pages=14, step_tokens=4))
    driver.submit(request("stream", prompt=(1,), max_tokens=12, priority=-1))
    driver.submit(request("scored", prompt=tuple(range(12)), max_tokens=1, prompt_logprobs=0))
    while not any(seq.scored for seq in driver.scheduler.waiting):
        driver.step()
    assert 0 < len(driver.results["scored", 0].prompt_logprobs) < 11
    driver.run()
    assert [entry.token for entry in driver.results["scored", 0].prompt_logprobs] == list(
        range(1, 12)
    )


# ---- Windows


def test_a_window_holds_what_it_sees_and_no_more() -> None:
    """With pages of 2 and a window of 5, the token at p sees p - 4 to p, which lie in 3 pages."""
    driver = Driver(config_of(page_size=2, num_pages=32, windows=(5,), prefix_cache=False))
    driver.submit(request(max_tokens=30))
    held = []
    while driver.engine.has_work:
        driver.step()
        held += [
            len([p for p in seq.pages[0] if p != NO_PAGE])
            for seq in driver.scheduler.lanes[0].running
        ]
    assert set(held[2:]) == {3}


def test_a_prompt_longer_than_a_window_s_pool_runs() -> None:
    config = config_of(page_size=2, num_pages=10, windows=(5,), step_tokens=6, max_batch=1)
    assert config.policies[0].held(1000) == 10 and config.capacity == 64
    driver = Driver(config)
    driver.submit(request(prompt=tuple(range(50)), max_tokens=8))
    driver.run()
    assert not driver.results["a", 0].times.preemptions


@pytest.mark.parametrize(("lost", "hit"), [(0, 8), (1, 8), (2, 4), (3, 6)])
def test_a_hit_needs_the_whole_prefix_of_one_group_and_what_a_window_sees_of_the_other(
    lost: int, hit: int
) -> None:
    """A window of 4 sees 5 to 8 after 8 tokens in pages of 2: pages 2, 3 and the next."""
    driver = Driver(config_of(page_size=2, windows=(None, 4)))
    driver.submit(request("a", prompt=PROMPT, max_tokens=1))
    driver.run()
    full, window = driver.scheduler.lanes[0].caches
    assert len(full) == len(window) == 5
    del window._entries[window._digest_of.pop(lost)]  # its pages were taken in order
    driver.submit(request("b", prompt=PROMPT, max_tokens=1))
    driver.run()
    assert driver.results["b", 0].cuts[0][1] == hit


def test_a_long_prompt_does_not_drive_out_the_windows_that_others_share() -> None:
    """The window's pool has 16 pages; 40 pages of a long prompt pass through it."""
    driver = Driver(config_of(page_size=2, max_context=100, step_tokens=8, windows=(None, 4)))
    driver = Driver(dataclasses.replace(driver.config, pools=(Pool(100), Pool(16, 4))))
    for name in ("first", "second"):
        driver.submit(request(name, prompt=(*PROMPT, 90, 91), max_tokens=2))
        driver.run()
    driver.submit(request("long", prompt=tuple(range(80)), max_tokens=1))
    driver.run()
    driver.submit(request("third", prompt=(*PROMPT, 92, 93), max_tokens=2))
    driver.run()
    assert driver.results["third", 0].cuts[0][1] == 10
