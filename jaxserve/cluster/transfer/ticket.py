"""Tickets: all that two servers tell each other of a piece before its bytes travel."""

import math
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import JaxserveError


class TransferError(JaxserveError):
    """Keys and values do not come over: whoever wanted them computes them itself.

    code: gRPC's. remote: the other side has said so, or is not there.
    """

    reason = "TRANSFER"

    def __init__(self, code: str, problem: str, remote: bool = False):
        super().__init__(problem)
        self.code, self.remote = code, remote


@dataclass(frozen=True, slots=True)
class Array:
    """name: a field of KVSegment."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What fetches a piece, once, and all that there is to know of it before. key: 128 random
    bits."""

    key: bytes
    group: int
    start: int
    arrays: tuple[Array, ...]

    @staticmethod
    def of(key: bytes, piece: KVSegment) -> "Ticket":
        arrays = (Array(name, array.dtype, array.shape) for name, array in piece.arrays.items())
        return Ticket(key, piece.group, piece.start, tuple(arrays))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)
