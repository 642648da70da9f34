"""KVSegment: its arrays and sizes, and contents that it refuses."""

import ml_dtypes
import numpy as np
import pytest

from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import EngineError

SHAPE = (2, 6, 3, 8)  # L T K H


def test_arrays_and_sizes() -> None:
    keys = np.zeros(SHAPE, np.int8)
    scale = np.ones(SHAPE[:-1], np.float32)
    segment = KVSegment(1, 8, keys, keys, scale, scale)
    assert segment.stop == 14 and segment.nbytes == 2 * (2 * 6 * 3) * (8 + 4)
    assert list(segment.arrays) == ["k", "v", "k_scale", "v_scale"]
    wider = KVSegment(0, 0, np.zeros(SHAPE), np.zeros((*SHAPE[:-1], 5)))
    assert wider.stop == 6 and wider.nbytes == 2 * 6 * 3 * (8 + 5) * 8
    latent = KVSegment(0, 0, np.zeros(SHAPE, ml_dtypes.bfloat16))
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
        {"k": WIDE, "v": WIDE[..., 0]},
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
def test_contradictions_are_refused(fields: dict) -> None:
    start = fields.get("start", 4)
    problem = f"from token {start} on must hold keys and values of one page group; these are: k "
    with pytest.raises(EngineError, match=problem):
        KVSegment(**{"group": 0, "start": start} | fields)
