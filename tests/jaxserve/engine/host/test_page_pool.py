"""PagePool, by hand and against a model that counts holders."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.host.page_pool import PagePool
from jaxserve.errors import EngineError


def mark_cached(pool: PagePool, pages: list[int]) -> list[int]:
    """Mark the pages as cached and return them."""
    for page in pages:
        pool.mark_cached(page)
    return pages


def test_every_page_is_handed_out_once() -> None:
    pool = PagePool(4)
    assert sorted(pool.allocate(1) + pool.allocate(3)) == [0, 1, 2, 3]
    assert pool.available == 0
    assert pool.allocate(0) == []


def test_too_many_pages_are_an_error_that_changes_nothing() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(EngineError, match="asked for 3 pages; 2 of 4 are available"):
        pool.allocate(3)
    assert pool.available == 2


def test_a_released_page_is_free_again_unless_it_is_kept() -> None:
    forgotten: list[int] = []
    pool = PagePool(2, forgotten.append)
    pages = pool.allocate(2)
    pool.mark_cached(pages[1])
    pool.release(pages)
    assert pool.available == 2
    assert pool.allocate(1) == [pages[0]] and forgotten == []
    assert pool.allocate(1) == [pages[1]] and forgotten == [pages[1]]


def test_idle_pages_go_the_least_recently_held_first_and_prefixes_from_their_end() -> None:
    forgotten: list[int] = []
    pool = PagePool(6, forgotten.append)
    old = mark_cached(pool, pool.allocate(3))
    new = mark_cached(pool, pool.allocate(3))
    pool.release(old)
    pool.release(new)
    pool.allocate(4)
    assert forgotten == [old[2], old[1], old[0], new[2]]


def test_a_shared_page_comes_back_with_its_last_holder() -> None:
    pool = PagePool(2)
    page = mark_cached(pool, pool.allocate(1))
    pool.share(page)
    pool.release(page)
    assert pool.available == 1
    pool.release(page)
    assert pool.available == 2
    assert pool.idle_among([0, 1]) == 2
    pool.share(page)
    assert pool.available == 1
    assert pool.idle_among(page) == 0


def test_releasing_more_often_than_taking_is_an_error() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(EngineError, match="page 0 is released more often"):
        pool.release(pages)


def test_dropped_idle_pages_are_forgotten_and_held_ones_are_not() -> None:
    forgotten: list[int] = []
    pool = PagePool(3, forgotten.append)
    idle = mark_cached(pool, pool.allocate(1))
    held = mark_cached(pool, pool.allocate(1))
    pool.release(idle)
    pool.drop_idle()
    assert forgotten == idle
    pool.release(held)
    assert pool.allocate(2) == [2, *idle]  # free ones first, the kept one stays
    pool.check_invariants([[2], idle])


@pytest.mark.parametrize("held", [[], [[0], [0]], [[0, 1]], [[2]]])
def test_invariants_see_holders_that_do_not_match(held: list[list[int]]) -> None:
    pool = PagePool(3)
    assert pool.allocate(1) == [0]
    pool.check_invariants([[0]])
    with pytest.raises(EngineError, match="other holders"):
        pool.check_invariants(held)


OPERATIONS = st.tuples(
    st.sampled_from("allocate share release keep drop".split()),
    st.integers(0, 9),
    st.integers(0, 9),
)


@settings(max_examples=300, derandomize=True)
@given(st.integers(1, 6), st.lists(OPERATIONS, max_size=60))
def test_pool_against_a_model(size: int, operations: list[tuple[str, int, int]]) -> None:
    """Compare with tables of pages and a set of cached pages; held pages never change hands."""
    cached: set[int] = set()
    # KeyError for a page that was not cached, or is forgotten twice.
    pool = PagePool(size, cached.remove)
    tables: list[list[int]] = []
    for name, number, other in operations:
        held = Counter(page for table in tables for page in table)
        assert pool.available == size - len(held)
        if name == "allocate" and number <= pool.available:
            taken = pool.allocate(number)
            assert (
                len(set(taken)) == number
                and not held.keys() & set(taken)
                and not cached & set(taken)
            )
            tables.append(taken)
        elif name == "share" and cached:
            table = sorted(cached)[: number + 1]
            pool.share(table)
            tables.append(table)
        elif name == "release" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif name == "keep" and held:
            page = sorted(held)[other % len(held)]
            pool.mark_cached(page)
            cached.add(page)
        elif name == "drop":
            pool.drop_idle()
            assert cached <= held.keys()
        pool.check_invariants(tables)
