"""A toy group of every kind that layers may keep, alone and mixed, over the fake device.

The device checks that whatever a query attends to is still in its page or slot.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, EngineOptions, Pool, SlotPool, resolve
from jaxserve.errors import ConfigError
from tests.fake_groups import FakeGroup
from tests.jaxserve.engine.host.driver import PROMPT, Driver, config_of, request
from tests.jaxserve.engine.host.test_scheduler_properties import (
    ACTIONS,
    EngineSetup,
    Groups,
    configs,
    engine_setups,
    play,
)

FULL = FakeGroup(layers=2, value=3)
SLIDING = FakeGroup(window=5, value=3)
OTHER_SIZES = FakeGroup(heads=3, key=6, value=4)  # other kv heads, and K wider than V
K_ALONE = FakeGroup(key=9)
SHARED = FakeGroup(value=3, readers=(None, 4))  # two layers read the entries of an earlier one
SHARED_WINDOW = FakeGroup(window=6, value=3, readers=(6,))
SLOT = FakeGroup(slot=True)
MIXTURES: tuple[Groups, ...] = (
    (FULL,),
    (SLIDING,),
    (OTHER_SIZES,),
    (K_ALONE,),
    (SHARED,),
    (SLOT,),
    (FULL, SLOT),
    (SLIDING, SLOT),
    (SHARED, SHARED_WINDOW, K_ALONE),
    (SLIDING, OTHER_SIZES, SLOT, SLOT),
    (FULL, SLIDING, OTHER_SIZES, K_ALONE, SHARED_WINDOW, SLOT),
)
SLOTS = tuple(groups for groups in MIXTURES if any(group.slot for group in groups))


def slot_config(**changes: Any) -> EngineConfig:
    """Return a small engine whose model has pages in one group and slots in the other."""
    chosen: dict[str, Any] = {
        "max_batch": 2,
        "step_tokens": 8,
        "page_size": 2,
        "cache_tokens": 64,
    }
    options = EngineOptions(**chosen | changes)
    return resolve(options, max_positions=40, lanes=1, affordable_tokens=0, slot_groups=1)


@settings(max_examples=200, derandomize=True)
@given(
    st.sampled_from(MIXTURES).flatmap(lambda groups: engine_setups(groups=groups)),
    st.lists(ACTIONS, min_size=4, max_size=16),
)
def test_any_traffic(setup: EngineSetup, actions: list[tuple[str, Any]]) -> None:
    play(setup.driver(), actions)


@settings(max_examples=100, derandomize=True)
@given(
    st.sampled_from(MIXTURES).flatmap(
        lambda groups: st.tuples(st.just(groups), configs(deterministic=True, groups=groups))
    ),
    st.lists(ACTIONS, min_size=4, max_size=16),
)
def test_any_traffic_deterministic(
    engine: tuple[Groups, EngineConfig], actions: list[tuple[str, Any]]
) -> None:
    groups, config = engine
    play(Driver(config, groups=groups), actions)


@settings(max_examples=40, derandomize=True)
@given(
    st.sampled_from(SLOTS).flatmap(lambda groups: engine_setups(embeds=True, groups=groups)),
    st.lists(ACTIONS, min_size=4, max_size=16),
)
def test_any_traffic_of_embeddings(setup: EngineSetup, actions: list[tuple[str, Any]]) -> None:
    play(setup.driver(), actions)


def test_a_sequence_holds_one_slot_however_long_it_is_and_gives_it_back() -> None:
    config = slot_config()
    driver = Driver(config)
    driver.submit(request("a", prompt=PROMPT, max_tokens=20))
    held = set[tuple[int, ...]]()
    while driver.engine.has_work:
        driver.step()
        held |= {tuple(seq.pages[1]) for seq in driver.scheduler.lanes[0].running}
    assert held == {(0,)}
    assert config.pools[1].pages == config.max_batch
    assert driver.scheduler.lanes[0].groups[1].pool.available == config.max_batch


def test_a_prefix_whose_state_is_in_no_slot_is_computed_again() -> None:
    """The pages of the prompt are cached, and of no use without the state behind them."""
    driver = Driver(slot_config())
    for name in ("first", "second"):
        driver.submit(request(name, prompt=PROMPT))
        driver.run()
    assert len(driver.scheduler.lanes[0].caches[0]) > 0
    assert len(driver.scheduler.lanes[0].caches[1]) == 0
    assert driver.results["second", 0].cuts[0] == ("prefill", 0, 8)


def test_a_preempted_sequence_gives_its_slot_back_and_begins_with_an_empty_one() -> None:
    driver = Driver(slot_config(cache_tokens=16, max_context=16))
    driver.submit(request("a", prompt=PROMPT[:4], max_tokens=8))
    driver.submit(request("b", prompt=PROMPT[4:8], max_tokens=8))
    free: list[int] = []
    while driver.engine.has_work:
        driver.step()
        if any(seq.times.preemptions for seq in driver.scheduler.waiting):
            free.append(driver.scheduler.lanes[0].groups[1].pool.available)
    assert free[0] == 1
    again = [a for plan in driver.plans for a in plan.admissions][2:]
    assert again and all(admission.length == 0 for admission in again)


def test_an_engine_admits_as_many_sequences_as_there_are_slots() -> None:
    driver = Driver(config_of(max_batch=3, pools=(Pool(32), SlotPool(1))))
    for name in ("a", "b"):
        driver.submit(request(name))
    running = []
    while driver.engine.has_work:
        driver.step()
        running.append(len(driver.scheduler.lanes[0].running))
    assert max(running) == 1


@pytest.mark.parametrize("changes", [{"speculate": "ngram"}, {"page_exchange": True}])
def test_what_a_state_cannot_do_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one state per sequence"):
        slot_config(**changes)
