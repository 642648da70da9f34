"""Rows shared between clients: a light one beside a heavy one waits about as long as alone.

Origin: one client's four requests of 16 choices held another client's request for 80 seconds.
"""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from tests.jaxserve.engine.host.driver import Driver, config_of, request
from tests.slow_cases import slow_but

LONG = tuple(n % 60 for n in range(200))
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without prefix cache": {"prefix_cache": False},
    "two lanes": {"lanes": 2, "max_batch": 8},
    "several decodes": {"decode_steps": 4},
    "windows": {"windows": (8, None)},
}
VERY_LONG = tuple(n % 60 for n in range(3000))
HEAVY: dict[str, dict[str, Any]] = {
    "choices": {"requests": 4, "n": 16},
    "requests": {"requests": 64},
    "long prompts": {"requests": 20, "prompt": LONG},
}


def engine(**changes: Any) -> Driver:
    sizes = {"max_batch": 16, "step_tokens": 64, "num_pages": 2048, "max_context": 512}
    return Driver(config_of(**sizes | changes))


def start_heavy(driver: Driver, requests: int, **changes: Any) -> None:
    for number in range(requests):
        driver.submit(request(f"heavy {number}", client="heavy", max_tokens=200, **changes))
    while not driver.results["heavy 0", 0].tokens:
        driver.step()


def steps_to_first_token(driver: Driver, name: str, **changes: Any) -> int:
    driver.submit(request(name, client="light", **changes))
    before = driver.steps
    while not driver.results[name, 0].tokens:
        driver.step()
    return driver.steps - before


def end(driver: Driver) -> None:
    """Abort what has not ended, and run until nothing is left."""
    for name, _ in driver.unfinished:
        driver.abort(name)
    driver.run()


def held(driver: Driver) -> Counter[str]:
    """Return the rows of each client whose sequences are not about to leave them."""
    lanes = driver.scheduler.lanes
    return Counter(s.request.client for lane in lanes for s in lane.running if not s.leaving)


@pytest.mark.parametrize("heavy", HEAVY)
@pytest.mark.parametrize("changes", slow_but(list(ENGINES), ("plain", "two lanes", "windows")))
def test_a_light_client_waits_at_most_three_times_as_long_as_alone(
    changes: str, heavy: str
) -> None:
    alone = steps_to_first_token(engine(**ENGINES[changes]), "alone")
    driver = engine(**ENGINES[changes])
    start_heavy(driver, **HEAVY[heavy])
    for number in range(5):
        assert steps_to_first_token(driver, f"light {number}") <= 3 * alone
        for _ in range(number):
            driver.step()
    end(driver)


@pytest.mark.parametrize("requests", [1, 4, 8])
@pytest.mark.parametrize("tokens", [10, 100, 200])
def test_a_short_prompt_does_not_wait_for_long_ones_of_another_client(
    requests: int, tokens: int
) -> None:
    sizes = {"max_context": 4096, "num_pages": 16_000, "prefix_cache": False}
    prompt = LONG[:tokens]
    alone = steps_to_first_token(engine(**sizes), "alone", prompt=prompt)
    driver = engine(**sizes)
    for number in range(requests):
        driver.submit(request(f"heavy {number}", client="heavy", prompt=VERY_LONG))
    for number in range(3):
        for _ in range(5):
            driver.step()
        assert steps_to_first_token(driver, f"light {number}", prompt=prompt) <= 3 * alone
    end(driver)


@pytest.mark.parametrize("requests", [6, 8, 11])
def test_pages_that_one_client_holds_alone_are_given_up_too(requests: int) -> None:
    """Its answers fill all pages while rows are free; the light client's prompt needs many."""
    driver = engine(num_pages=58 * requests, prefix_cache=False)
    start_heavy(driver, requests=requests, prompt=LONG)
    while driver.scheduler.lanes[0].available_pages() > 16:
        driver.step()
    assert driver.scheduler.lanes[0].has_row
    assert steps_to_first_token(driver, "light", prompt=LONG[:150]) <= 12
    end(driver)


def test_a_client_keeps_no_more_than_its_share_when_others_come() -> None:
    """Each of the others asks for a whole engine as well, but for less than the first client."""
    driver = engine()
    start_heavy(driver, requests=5, n=16)
    for client in ("b", "c"):
        driver.submit(request(client, client=client, n=16, max_tokens=200))
    for _ in range(30):
        driver.step()
    assert held(driver).total() == 16 and held(driver)["heavy"] <= 16 // 3 + 1
    end(driver)


def test_equal_clients_take_no_row_from_each_other() -> None:
    """A request that has begun ends with all of its choices before the next one gets a row."""
    driver = engine(max_batch=4)
    names = ["a", "b", "c", "d"]
    for client in names:
        driver.submit(request(client, client=client, prompt=(1, 2), n=4, max_tokens=20))
    ended: list[str] = []
    while len(ended) < 16:
        ended += [event.request_id for event in driver.step() if event.finish]
    assert ended == [name for name in names for _ in range(4)]
    assert driver.scheduler.preemptions == 0


def test_what_was_given_up_goes_on_where_it_was() -> None:
    """The preempted answer finds its pages again, and the rows are the heavy client's once more."""
    driver = engine()
    start_heavy(driver, requests=1, n=16)
    for _ in range(20):
        driver.step()
    steps_to_first_token(driver, "light")
    while not driver.results["light", 0].finish:
        driver.step()
    for _ in range(6):
        driver.step()
    assert held(driver) == {"heavy": 16}
    again = [
        (start, size)
        for index in range(16)
        for before, (_, start, size) in pairwise(driver.results["heavy 0", index].cuts)
        if start != before[1] + before[2]
    ]
    assert again == [(28, 3)], "all but the last page is found"
    end(driver)


def test_a_client_alone_is_never_preempted_for_its_own() -> None:
    driver = engine()
    start_heavy(driver, requests=2, n=16)
    driver.run()
    assert driver.scheduler.preemptions == 0


def test_the_light_client_is_not_preempted_when_pages_run_out() -> None:
    """What the heavy client holds above its share goes first."""
    driver = engine(num_pages=120, prefix_cache=False)
    start_heavy(driver, requests=1, n=16)
    driver.submit(request("light", client="light", max_tokens=60))
    driver.run()
    assert driver.scheduler.preemptions > 1
    times = driver.results["light", 0].times
    assert times is not None and times.preemptions == 0


def test_a_lower_priority_takes_no_row() -> None:
    driver = engine()
    start_heavy(driver, requests=1, n=16)
    driver.submit(request("patient", client="light", priority=1))
    for _ in range(20):
        driver.step()
    assert held(driver) == {"heavy": 16}
    end(driver)


def test_a_deterministic_engine_takes_no_row_back_but_gives_the_next_one() -> None:
    driver = engine(deterministic=True, max_batch=4)
    start_heavy(driver, requests=4, n=4)
    driver.submit(request("light", client="light"))
    while not driver.results["heavy 0", 0].finish:
        driver.step()
    for _ in range(4):
        driver.step()
    assert held(driver)["light"] == 1
    end(driver)
    assert driver.scheduler.preemptions == 0


def test_later_choices_are_served_while_new_clients_keep_coming() -> None:
    """Each of them asks for one choice, which goes before later choices, and is never seen again.

    The queue never has more than four of them.
    """
    driver = engine(max_batch=1)
    driver.submit(request("many", client="many", n=4, max_tokens=2))
    while any(not driver.results["many", index].finish for index in range(4)):
        assert driver.steps < 300, "the later choices are starved"
        if len(driver.scheduler.waiting.clients - {"many"}) < 4:
            name = f"new {driver.steps}"
            driver.submit(request(name, client=name, max_tokens=2))
        driver.step()
    driver.run()


def test_requests_of_one_choice_go_by_arrival_whoever_sends_them() -> None:
    driver = engine(max_batch=1)
    order = ["a", "b", "c", "d", "e", "f"]
    for name in order:
        driver.submit(request(name, client=name, max_tokens=2))
    driver.run()
    admitted = [driver.results[name, 0].times for name in order]
    first = [
        next(n for n, plan in enumerate(driver.plans) if name in driver.request_ids(plan))
        for name in order
    ]
    assert all(admitted) and first == sorted(first)
