"""Packs two int4 numbers into a byte; NumPy and zarr3 both give each a byte of its own.

Neighbours along the last dimension share a byte, the first of them in its low half.
"""

import ml_dtypes
import numpy as np

INT4 = np.dtype(ml_dtypes.int4)


def paired(numbers: np.ndarray) -> np.ndarray:
    """Pack int4 [..., 2 n] into uint8 [..., n]."""
    halves = numbers.view(np.uint8) & 0xF
    return halves[..., ::2] | halves[..., 1::2] << 4


def unpaired(pairs: np.ndarray) -> np.ndarray:
    """Unpack uint8 [..., n] into int4 [..., 2 n], by a table of all bytes."""
    every = np.arange(256, dtype=np.uint8)
    halves = np.stack((every & 0xF, every >> 4), axis=-1).view(np.uint16)[:, 0]
    return halves[pairs].view(INT4)
