"""Tickets as messages, and pieces as bytes: arrays one after the other, in C order and
little-endian.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import ml_dtypes
import numpy as np

from jaxserve.cluster.transfer.ticket import Array, Ticket, TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.engine.kv_segment import KVSegment
from jaxserve.errors import EngineError

CHUNK = 2**20  # bytes of a message
TAG = b"\x0a"  # of field 1, bytes
VARINT = 6  # a tag and a size of 32 bits are no longer
NAMES = ("k", "v", "k_scale", "v_scale")
DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        str(dtype): dtype
        for dtype in map(
            np.dtype, (np.float32, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn)
        )
    }
)


def ticket_to_proto(ticket: Ticket) -> pb.PrefillResponse:
    arrays = [
        pb.Array(name=array.name, dtype=str(array.dtype), shape=array.shape)
        for array in ticket.arrays
    ]
    return pb.PrefillResponse(
        ticket=ticket.key, group=ticket.group, start=ticket.start, arrays=arrays
    )


def ticket_from_proto(message: pb.PrefillResponse) -> Ticket:
    """TransferError DATA_LOSS for what no piece consists of."""
    return Ticket(
        message.ticket, message.group, message.start, tuple(map(_array_from_proto, message.arrays))
    )


def _array_from_proto(array: pb.Array) -> Array:
    if array.name not in NAMES or array.dtype not in DTYPES:
        raise TransferError(
            "DATA_LOSS", f"a piece has no array {array.name!r:.40} of {array.dtype!r:.40}"
        )
    return Array(array.name, DTYPES[array.dtype], tuple(array.shape))


def chunks(piece: KVSegment) -> Iterator[memoryview]:
    """The piece's bytes, at most CHUNK at a time."""
    for array in piece.arrays.values():
        data = memoryview(array.reshape(-1).view(np.uint8))
        yield from (data[begin : begin + CHUNK] for begin in range(0, len(data), CHUNK))


def message_of(data: memoryview) -> bytes:
    """A FetchResponse as it travels. protobuf itself would copy the data twice more: half of the
    speed.
    """
    return b"".join((_head(len(data)), data))


def data_of(message: bytes) -> memoryview:
    """The data of a FetchResponse. TransferError DATA_LOSS for anything else."""
    begin = 1 + next((i for i, byte in enumerate(message[1:VARINT], 1) if byte < 128), 0)
    size = len(message) - begin
    if size < 0 or message[:begin] != _head(size):
        raise TransferError("DATA_LOSS", f"a message of {len(message)} bytes is none of a piece")
    return memoryview(message)[begin:]


def _head(size: int) -> bytes:
    """What stands before so many bytes: the field's tag, and the size in seven bits a byte, the
    lowest first.
    """
    found = bytearray(TAG)
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    return bytes((*found, size))


class Blank:
    """A piece whose bytes are still to come."""

    def __init__(self, ticket: Ticket):
        self._ticket = ticket
        self._data = np.empty(ticket.nbytes, np.uint8)
        self._filled = 0

    def fill(self, data: bytes | memoryview) -> None:
        """The next bytes. TransferError DATA_LOSS when they are more than the piece has."""
        end = self._filled + len(data)
        self._check(end <= self._data.size, end)
        self._data[self._filled : end] = np.frombuffer(data, np.uint8)
        self._filled = end

    def piece(self) -> KVSegment:
        """TransferError DATA_LOSS when bytes are missing, or when the arrays are none that a piece
        has.
        """
        self._check(self._filled == self._data.size, self._filled)
        arrays = self._arrays()
        try:
            return KVSegment(self._ticket.group, self._ticket.start, **arrays)
        except (EngineError, TypeError) as error:  # TypeError: without k
            raise TransferError("DATA_LOSS", str(error)) from None

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {}
        begin = 0
        for array in self._ticket.arrays:
            data = self._data[begin : begin + array.nbytes]
            arrays[array.name] = data.view(array.dtype).reshape(array.shape)
            begin += array.nbytes
        return arrays

    def _check(self, fits: bool, filled: int) -> None:
        if not fits:
            raise TransferError("DATA_LOSS", f"{filled} bytes came of a piece of {self._data.size}")
