"""Gathers and scatters of lanes, against loops over numpy arrays."""

import numpy as np
import pytest

from jaxserve.engine.device.lane_index import add, put, take
from jaxserve.engine.row_fields import NEVER, NO_TOKEN

LANES, ROWS, COLUMNS, WIDTH = 2, 3, 4, 5
RNG = np.random.default_rng(3)
FIELD = RNG.integers(0, 100, (LANES, ROWS, COLUMNS, WIDTH)).astype(np.int32)

# Per lane: rows and columns. One pair comes twice, and the last three are padding.
ROW = np.array([[0, 2, 1, 1, ROWS, -1, NO_TOKEN], [2, 0, 0, 0, ROWS, -ROWS, NEVER]], np.int32)
COLUMN = np.array([[3, 0, 1, 1, 0, 0, 1], [1, 2, 3, 3, 1, 0, 2]], np.int32)
TWICE = (2, 3)  # places of the pair


@pytest.mark.parametrize("index", [(ROW,), (ROW, COLUMN)], ids=["rows", "rows and columns"])
def test_take(index: tuple[np.ndarray, ...]) -> None:
    found = np.asarray(take(FIELD, *index))
    assert found.shape == (*ROW.shape, *FIELD.shape[1 + len(index) :])
    for lane, place in live(index):
        np.testing.assert_array_equal(
            found[lane, place], FIELD[lane][tuple(i[lane, place] for i in index)]
        )


@pytest.mark.parametrize("index", [(ROW,), (ROW, COLUMN)], ids=["rows", "rows and columns"])
def test_put(index: tuple[np.ndarray, ...]) -> None:
    value = RNG.integers(100, 200, (*ROW.shape, *FIELD.shape[1 + len(index) :])).astype(np.int32)
    value[:, TWICE[1]] = value[:, TWICE[0]]  # which of two for one entry stays is not defined
    expected = FIELD.copy()
    for lane, place in live(index):
        expected[lane][tuple(i[lane, place] for i in index)] = value[lane, place]
    np.testing.assert_array_equal(put(FIELD, value, *index), expected)


@pytest.mark.parametrize("index", [(ROW,), (ROW, COLUMN)], ids=["rows", "rows and columns"])
def test_add(index: tuple[np.ndarray, ...]) -> None:
    value = RNG.integers(100, 200, (*ROW.shape, *FIELD.shape[1 + len(index) :])).astype(np.int32)
    expected = FIELD.copy()
    for lane, place in live(index):
        expected[lane][tuple(i[lane, place] for i in index)] += value[lane, place]
    np.testing.assert_array_equal(add(FIELD, value, *index), expected)


def test_indices_with_several_axes() -> None:
    """A row has several places, as it has several sampling slots."""
    field = FIELD[..., 0]
    rows = np.broadcast_to(ROW[:, :2, None], (LANES, 2, 3))
    columns = RNG.integers(0, COLUMNS, rows.shape).astype(np.int32)
    lanes = np.arange(LANES)[:, None, None]
    np.testing.assert_array_equal(take(field, rows, columns), field[lanes, rows, columns])


def live(index: tuple[np.ndarray, ...]) -> list[tuple[int, int]]:
    """Return lane and place of every entry that is not padding."""
    rows = index[0]
    places = np.ndindex(*rows.shape)
    return [(lane, place) for lane, place in places if 0 <= rows[lane, place] < ROWS]
