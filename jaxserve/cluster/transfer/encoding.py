"""Encode tickets as messages, and segments as bytes.

A segment's bytes are those of its arrays, one after the other, in C order and little-endian.
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
# A FetchResponse on the wire: the tag of its field `data`, the size as a varint, the data.
TAG = b"\x0a"  # field 1, length-delimited
MAX_HEAD = 6  # bytes of the tag and of a varint of 32 bits
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
    """Parse a ticket; TransferError DATA_LOSS if no segment can consist of its arrays."""
    return Ticket(
        message.ticket, message.group, message.start, tuple(map(_array_from_proto, message.arrays))
    )


def _array_from_proto(array: pb.Array) -> Array:
    if array.name not in NAMES or array.dtype not in DTYPES:
        raise TransferError(
            "DATA_LOSS", f"a piece has no array {array.name!r:.40} of {array.dtype!r:.40}"
        )
    return Array(array.name, DTYPES[array.dtype], tuple(array.shape))


def chunks(segment: KVSegment) -> Iterator[memoryview]:
    """Yield the segment's bytes, at most CHUNK at a time."""
    for array in segment.arrays.values():
        data = memoryview(array.reshape(-1).view(np.uint8))
        for begin in range(0, len(data), CHUNK):
            yield data[begin : begin + CHUNK]


def message_of(data: memoryview) -> bytes:
    """Return a FetchResponse as it is on the wire.

    protobuf would copy the data twice more, at half of the speed.
    """
    return b"".join((_head(len(data)), data))


def data_of(message: bytes) -> memoryview:
    """Return the data of a FetchResponse; TransferError DATA_LOSS for any other message."""
    begin = _head_size(message)
    size = len(message) - begin
    # One comparison checks the tag, the size, and that no further field follows.
    if size < 0 or message[:begin] != _head(size):
        raise TransferError(
            "DATA_LOSS", f"a message of {len(message)} bytes is no part of a segment"
        )
    return memoryview(message)[begin:]


def _head_size(message: bytes) -> int:
    """Return the bytes up to the end of the size, whose last byte is below 128."""
    for i, byte in enumerate(message[1:MAX_HEAD], 1):
        if byte < 128:
            return i + 1
    return 1


def _head(size: int) -> bytes:
    """Return what precedes the data: the field's tag, and the size as a varint.

    A varint has seven bits in each byte, the lowest first; all bytes but the last have bit 7 set.
    """
    found = bytearray(TAG)
    while size > 127:
        found.append(size & 127 | 128)
        size >>= 7
    return bytes((*found, size))


class SegmentBuffer:
    """A segment whose bytes are still to come."""

    def __init__(self, ticket: Ticket):
        self._ticket = ticket
        self._data = np.empty(ticket.nbytes, np.uint8)
        self._filled = 0

    def fill(self, data: bytes | memoryview) -> None:
        """Append the next bytes; TransferError DATA_LOSS when the segment has fewer."""
        end = self._filled + len(data)
        self._check(end <= self._data.size, end)
        self._data[self._filled : end] = np.frombuffer(data, np.uint8)
        self._filled = end

    def segment(self) -> KVSegment:
        """Return the segment; TransferError DATA_LOSS for missing bytes or wrong arrays."""
        self._check(self._filled == self._data.size, self._filled)
        arrays = self._arrays()
        try:
            return KVSegment(self._ticket.group, self._ticket.start, **arrays)
        except (EngineError, TypeError) as error:  # TypeError: the ticket has no array k
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
