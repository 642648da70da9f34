"""Gathers and scatters of lanes, against loops over numpy arrays."""

import numpy as np
import pytest

from jaxserve.engine.device.lane_index import add, put, take

LANES, ROWS, COLUMNS, WIDTH = 2, 3, 4, 5
RNG = np.random.default_rng(3)
FIELD = RNG.integers(0, 100, (LANES, ROWS, COLUMNS, WIDTH)).astype(np.int32)

# Per lane: rows and columns. The pair before the last comes twice, the last is padding.
ROW = np.array([[0, 2, 1, 1, ROWS], [2, 0, 0, 0, ROWS]], np.int32)
COLUMN = np.array([[3, 0, 1, 1, 0], [1, 2, 3, 3, 1]], np.int32)


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
    value[:, -2] = value[:, -3]  # two for one place: which of them stays is nobody's business
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
    return [(lane, place) for lane, place in np.ndindex(*ROW.shape) if index[0][lane, place] < ROWS]
