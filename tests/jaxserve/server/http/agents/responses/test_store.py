"""The store of responses: its bounds in bytes and age, and who may see what."""

import json
from typing import Any

import pytest

from jaxserve.server.http.agents.responses.store import MAX_SHELVES, NotStoredError, ResponseStore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def response(id: str, size: int = 0) -> dict[str, Any]:
    return {"id": id, "output": [{"type": "message", "text": "y" * size}]}


def has(store: ResponseStore, id: str, token: str = "") -> bool:
    try:
        store.get(id, token)
    except NotStoredError:
        return False
    return True


def test_a_response_is_seen_with_its_token_alone() -> None:
    store = ResponseStore(10**6, 60)
    store.put(response("a"), [b'{"text":"x"}'], "one")
    assert has(store, "a", "one") and not has(store, "a", "two") and not has(store, "a")
    stored = store.get("a", "one")
    assert stored.input_items() == [{"text": "x"}]
    assert stored.conversation() == [{"text": "x"}, *json.loads(stored.response)["output"]]
    with pytest.raises(NotStoredError, match="belongs to another token"):
        store.delete("a", "two")
    store.delete("a", "one")
    assert not has(store, "a", "one")


def test_old_responses_are_dropped() -> None:
    clock = Clock()
    store = ResponseStore(10**6, 60, clock)
    store.put(response("a"), [], "")
    clock.now = 59.0
    store.put(response("b"), [], "")
    clock.now = 61.0
    assert not has(store, "a") and has(store, "b")
    clock.now = 120.0
    assert not has(store, "b") and not store._shelves


def test_the_oldest_make_room() -> None:
    store = ResponseStore(3500, 60)
    for id in "abc":
        store.put(response(id, 600), [], "")
    assert [has(store, id) for id in "abc"] == [False, True, True]


def test_one_that_is_larger_than_all_may_be_drops_nothing() -> None:
    store = ResponseStore(4000, 60)
    store.put(response("a", 100), [], "")
    store.put(response("b", 5000), [], "")
    assert has(store, "a") and not has(store, "b")


def test_who_has_most_makes_room() -> None:
    store = ResponseStore(4000, 60)
    store.put(response("mine", 100), [], "one")
    for i in range(10):
        store.put(response(f"r{i}", 600), [], "two")
    assert has(store, "mine", "one") and has(store, "r9", "two") and not has(store, "r0", "two")


def test_a_chain_shares_its_items() -> None:
    store = ResponseStore(10**6, 60)
    store.put(response("a"), [b"{}"], "")
    first = store.get("a", "")
    store.put(response("b"), [*first.items, b"{}"], "")
    second = store.get("b", "")
    assert second.items[0] is first.items[0] and second.inputs == 3


def test_any_number_of_tokens_has_bounds() -> None:
    store = ResponseStore(10**6, 60)
    for i in range(MAX_SHELVES + 5):
        store.put(response(f"r{i}"), [], f"token {i}")
    assert len(store._shelves) == MAX_SHELVES + 1
    last = MAX_SHELVES + 4
    assert has(store, f"r{last}", f"token {last}") and not has(store, f"r{last}", "token 0")
    assert not has(store, f"r{last}", f"token {last - 1}")
    store.delete(f"r{last}", f"token {last}")
    assert not has(store, f"r{last}", f"token {last}")
