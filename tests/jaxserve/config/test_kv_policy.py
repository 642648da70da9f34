"""Policies of the KV cache against their definition, token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config.kv_policy import (
    NO_PAGE,
    FullPages,
    KVPolicy,
    SlidingPages,
    StateSlots,
)

MANY = 10**6
POLICIES = st.one_of(
    st.builds(FullPages, st.integers(1, 5)),
    st.builds(SlidingPages, st.integers(1, 5), st.integers(1, 12), st.integers(1, 8)),
)
FOUND = st.lists(st.sampled_from([NO_PAGE, 7]), max_size=12)


def pages_seen(policy: KVPolicy, position: int) -> set[int]:
    """Return the pages of all tokens that the one at `position` attends to, but for its own."""
    window = policy.window if isinstance(policy, SlidingPages) else MANY
    seen = range(max(0, position - window + 1), position)
    return {token // policy.page_size for token in seen}


@settings(derandomize=True)
@given(POLICIES, FOUND, st.integers(0, 12))
def test_covered_is_the_longest_prefix_that_the_next_token_can_go_on_from(
    policy: KVPolicy, found: list[int], limit: int
) -> None:
    limit = min(limit, len(found))
    there = {i for i, page in enumerate(found) if page != NO_PAGE}
    lengths = [n for n in range(limit + 1) if pages_seen(policy, n * policy.page_size) <= there]
    assert policy.covered(found, limit) == max(lengths)


@settings(derandomize=True)
@given(POLICIES, st.integers(0, 60))
def test_released_pages_are_those_that_no_later_token_sees(policy: KVPolicy, settled: int) -> None:
    table = list(range(policy.span(61)))
    released = set(policy.release(table, settled))
    needed = set[int]().union(*(pages_seen(policy, later) for later in range(settled, 62)))
    own = set(range(settled // policy.page_size, len(table)))
    assert released.isdisjoint(needed | own)
    if policy.slides:
        assert released | needed | own == set(table)


@settings(derandomize=True)
@given(POLICIES, st.integers(1, 60), st.data())
def test_held_is_the_most_that_a_sequence_holds(
    policy: KVPolicy, tokens: int, data: st.DataObject
) -> None:
    """The table grows to `ahead` tokens behind what is settled, and is released as it settles."""
    limit = policy.in_flight if isinstance(policy, SlidingPages) else MANY
    table: list[int] = []
    settled = 0
    while settled < tokens:
        ahead = data.draw(st.integers(1, min(limit, tokens - settled)))
        table += [1] * (policy.span(settled + ahead) - len(table))
        assert sum(page != NO_PAGE for page in table) <= policy.held(tokens)
        settled += data.draw(st.integers(1, ahead))
        for i in policy.release(table, settled):
            table[i] = NO_PAGE


def test_a_slot_holds_any_number_of_tokens() -> None:
    policy = StateSlots(4)
    assert policy.held(MANY) == 1
    assert policy.longest(1, max_context=40) == 40
    assert [policy.first_needed(position) for position in (0, 3, 4, 5, 8)] == [0, 0, 0, 1, 1]


def test_a_prefix_is_found_in_the_state_of_exactly_its_length() -> None:
    policy = StateSlots(4)
    found = [NO_PAGE, 7, NO_PAGE, 5, NO_PAGE]
    assert [policy.covered(found, limit) for limit in range(6)] == [0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize("keeps_last", [False, True])
def test_states_that_were_left_behind_come_back(keeps_last: bool) -> None:
    """The entry of the last token is read; that of the last whole page may be kept as well."""
    policy = StateSlots(4, interval=8, keeps_last=keeps_last)
    table = [1, NO_PAGE, 2, 3]
    assert [list(policy.release(table, settled)) for settled in (12, 13, 16)] == [
        [0],
        [0] if keeps_last else [0, 2],
        [0, 2],
    ]


def test_which_states_are_snapshots() -> None:
    """Those of every interval, and those behind a prompt's last whole page."""
    policy = StateSlots(4, interval=16, unit=4)
    ends = range(4, 40, 4)
    assert [end for end in ends if policy.is_findable(end, 27)] == [16, 24]
    assert [end for end in ends if policy.is_findable(end, 28)] == [16, 24, 28]
    assert [end for end in ends if policy.is_findable(end, 34)] == [16, 32]
    assert not any(StateSlots(4).is_findable(end, 28) for end in ends)


def test_a_full_group_needs_the_pages_before_those_that_arrive_and_a_window_does_not() -> None:
    assert FullPages(4).first_needed_before(3) == 0
    assert SlidingPages(4, window=9, in_flight=8).first_needed_before(3) == 3
