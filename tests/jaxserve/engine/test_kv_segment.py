"""KV segments: their properties, and the arrays that they refuse."""

import ml_dtypes
import numpy as np
import pytest

from jaxserve.engine.kv_segment import Piece
from jaxserve.errors import EngineError

SHAPE = (2, 6, 3, 8)  # L T K H


def test_properties() -> None:
    keys = np.zeros(SHAPE, np.int8)
    scale = np.ones(SHAPE[:-1], np.float32)
    piece = Piece(1, 8, keys, keys, scale, scale)
    assert piece.stop == 14 and piece.nbytes == 2 * (2 * 6 * 3) * (8 + 4)
    assert list(piece.arrays) == ["k", "v", "k_scale", "v_scale"]
    latent = Piece(0, 0, np.zeros(SHAPE, ml_dtypes.bfloat16))
    assert latent.stop == 6 and list(latent.arrays) == ["k"] and latent.nbytes == 2 * 6 * 3 * 8 * 2


WIDE = np.zeros(SHAPE, np.float32)
NARROW = np.zeros(SHAPE, ml_dtypes.float8_e4m3fn)
SCALE = np.zeros(SHAPE[:-1], np.float32)


@pytest.mark.parametrize(
    "fields",
    [
        {"start": -1, "k": WIDE},
        {"k": WIDE[0]},
        {"k": WIDE, "v": WIDE[:, :5]},
        {"k": WIDE, "v": WIDE.astype(np.float64)},
        {"k": WIDE, "k_scale": SCALE},
        {"k": NARROW},
        {"k": NARROW, "v": NARROW, "k_scale": SCALE},
        {"k": NARROW, "k_scale": SCALE, "v_scale": SCALE},
        {"k": NARROW, "k_scale": SCALE[:1]},
        {"k": NARROW, "k_scale": SCALE.astype(np.float64)},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_refused_arrays(fields: dict) -> None:
    start = fields.get("start", 4)
    with pytest.raises(
        EngineError,
        match=f"from token {start} on, these are no keys and values of a page group: k ",
    ):
        Piece(**{"group": 0, "start": start} | fields)
