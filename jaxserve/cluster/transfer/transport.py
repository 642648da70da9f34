"""What a way between servers has to do: offer pieces on one side, fetch them on the other.

The two sides share tickets, which travel in messages of their own (see prefill.py), whatever way the bytes take. All of
it runs in the event loop's thread, and a deadline is a time of that loop's clock.
"""

import math
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.engine.kv_segment import Piece
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
    """name: a field of Piece."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What fetches a piece, once, and all that there is to know of it before. key: 128 random bits."""

    key: bytes
    group: int
    start: int
    arrays: tuple[Array, ...]

    @staticmethod
    def of(key: bytes, piece: Piece) -> "Ticket":
        arrays = (Array(name, array.dtype, array.shape) for name, array in piece.arrays.items())
        return Ticket(key, piece.group, piece.start, tuple(arrays))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class Offering(Protocol):
    """The pieces of one prompt."""

    async def offer(self, piece: Piece, deadline: float) -> Ticket:
        """Wait for room, and let the piece be fetched until the deadline.

        TransferError: RESOURCE_EXHAUSTED where there is no room by then, or never; DEADLINE_EXCEEDED where an earlier
        piece was not fetched in time, so that nobody needs this one.
        """
        ...

    async def fetched(self) -> None:
        """Wait until all of them are. TransferError when one will not be."""
        ...


class Sender(Protocol):
    def offering(self) -> AbstractAsyncContextManager[Offering]:
        """Leaving the block takes back what nobody fetched."""
        ...


class Receiver(Protocol):
    def fetch(self, ticket: Ticket, deadline: float) -> AbstractAsyncContextManager[Piece]:
        """The piece takes up room until the block is left. TransferError when it did not come by the deadline."""
        ...
