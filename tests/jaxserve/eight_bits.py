"""Numbers of 8 bits in numpy, from the formats' definitions: what pages must hold of keys and
values.
"""

import ml_dtypes
import numpy as np

GRIDS = {
    "int8": np.arange(-127, 128, dtype=np.float64),
    "float8_e4m3fn": np.unique(
        np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    )[:-1],
}  # the last of the sorted ones is NaN


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Every vector [..., H] as the nearest numbers of the format, its largest magnitude the
    format's largest number.
    """
    grid, largest = GRIDS[dtype], np.abs(x).max(-1, keepdims=True)
    scale = np.where(largest > 0, largest, 1) / grid[-1]
    return grid[np.searchsorted((grid[1:] + grid[:-1]) / 2, x / scale)] * scale
