"""Checks of request values: what they cost, where a client may send very many."""

import numpy as np
import pytest

from jaxserve.errors import RequestError
from jaxserve.request_values import check_token_ids, integers


def test_integers_of_any_kind_become_plain_ones() -> None:
    assert integers("ids", np.arange(3)) == (0, 1, 2)
    assert {type(value) for value in integers("ids", [1, np.int64(2)])} == {int}
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(RequestError, match=r"ids has .* as entry 1; it must be an integer"):
            integers("ids", [1, wrong])


def test_plain_integers_are_taken_as_they_are() -> None:
    """Each of 64 prompts of a body may allow 262,144 tokens, and is checked on its own."""
    ids = tuple(range(1000))
    assert integers("ids", ids) is ids


def test_ids_outside_of_the_vocabulary() -> None:
    check_token_ids("ids", (), 10)
    check_token_ids("ids", {0: 1.0, 9: 2.0}, 10)
    for wrong in (-1, 10):
        with pytest.raises(RequestError, match=f"ids has {wrong} as entry 1; the vocabulary has"):
            check_token_ids("ids", (3, wrong, -5), 10)
