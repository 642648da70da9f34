"""Tickets: the description of a segment that is sent before its bytes."""

import math
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import JaxserveError


class TransferError(JaxserveError):
    """Keys and values do not come over; the server that needs them computes them itself.

    `code` is gRPC's. `remote` says that the other side reported the error, or cannot be reached.
    """

    reason = "TRANSFER"

    def __init__(self, code: str, problem: str, remote: bool = False):
        super().__init__(problem)
        self.code = code
        self.remote = remote


@dataclass(frozen=True, slots=True)
class Array:
    """Description of one array of a segment; `name` is the segment's field."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Description of a segment, and the key that fetches it once.

    `key` has 128 random bits. `group` is the index of the page group, and `start` the position in
    the prompt of the segment's first token.
    """

    key: bytes
    group: int
    start: int
    arrays: tuple[Array, ...]

    @staticmethod
    def of(key: bytes, segment: KVSegment) -> "Ticket":
        """Describe a segment."""
        arrays = (Array(name, array.dtype, array.shape) for name, array in segment.arrays.items())
        return Ticket(key, segment.group, segment.start, tuple(arrays))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)
