"""A toy group of every kind that layers may keep, alone and mixed, over the fake device.

The device checks that whatever a query attends to is still in its page or slot.
"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig
from tests.fake_groups import FakeGroup
from tests.jaxserve.engine.host.driver import Driver
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
