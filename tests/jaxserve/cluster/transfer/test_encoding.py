"""Segments as bytes: equal bit for bit after the way, and every other message is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cluster.transfer.encoding import (
    CHUNK,
    SegmentBuffer,
    chunks,
    data_of,
    message_of,
    ticket_from_proto,
    ticket_to_proto,
)
from jaxserve.cluster.transfer.ticket import Ticket, TransferError
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.engine.kv_segment import KVSegment
from tests.jaxserve.cluster.transfer.harness import (
    DTYPES,
    equal_segments,
    large_segment,
    random_segment,
)

KEY = b"k" * 16


def rebuilt(piece: KVSegment, cut: int = CHUNK) -> KVSegment:
    """Return the segment after the way, in chunks of another size than it was sent in."""
    offer = ticket_to_proto(Ticket.of(KEY, piece)).SerializeToString()
    buffer = SegmentBuffer(ticket_from_proto(pb.PrefillResponse.FromString(offer)))
    data = b"".join(chunks(piece))
    for begin in range(0, len(data), cut):
        buffer.fill(data[begin : begin + cut])
    return buffer.segment()


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_piece(dtype: str, latent: bool) -> None:
    piece = random_segment(5, 32, group=1, dtype=dtype, latent=latent, heads=1 if latent else 3)
    assert equal_segments(rebuilt(piece), piece)


@given(
    tokens=st.integers(0, 9),
    start=st.integers(0, 2**32 - 1),
    group=st.integers(0, 9),
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    width=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
    cut=st.integers(1, 64),
)
def test_any_piece(cut: int, **sizes: int) -> None:
    piece = random_segment(**sizes)  # type: ignore[arg-type]
    assert equal_segments(rebuilt(piece, cut), piece)


def test_a_message_is_at_most_one_mebibyte_long() -> None:
    sizes = [len(data) for data in chunks(large_segment(5 * CHUNK // 2))]
    assert sizes == [CHUNK, CHUNK, CHUNK // 2]


def test_chunks_are_views_of_the_piece() -> None:
    piece = large_segment(4 * CHUNK)
    assert all(np.shares_memory(np.frombuffer(data, np.uint8), piece.k) for data in chunks(piece))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, CHUNK - 1, CHUNK])
def test_messages_are_protobufs(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    message = message_of(memoryview(data))
    assert pb.FetchResponse.FromString(message) == pb.FetchResponse(data=data)
    assert data_of(message) == data
    if size:
        assert message == pb.FetchResponse(data=data).SerializeToString()


@given(
    st.binary(max_size=40)
    | st.binary(max_size=40).map(lambda data: b"\n" + bytes([len(data)]) + data)
)
def test_any_bytes_as_a_message(message: bytes) -> None:
    """Exactly those messages are taken that protobuf would parse to the same data."""
    try:
        data = data_of(message)
    except TransferError as error:
        assert error.code == "DATA_LOSS"
    else:
        assert pb.FetchResponse.FromString(message).data == data


def test_messages_that_are_cut_off_or_go_on() -> None:
    whole = message_of(memoryview(bytes(300)))
    for message in (b"", b"\n", b"\n" + b"\xff" * 6, whole[:-1], whole + b"x", b"\x12" + whole[1:]):
        with pytest.raises(
            TransferError, match=f"a message of {len(message)} bytes is no part of a segment"
        ) as caught:
            data_of(message)
        assert caught.value.code == "DATA_LOSS"


@pytest.mark.parametrize("count", [0, 1151, 1153])
def test_bytes_that_are_too_few_or_too_many(count: int) -> None:
    buffer = SegmentBuffer(Ticket.of(KEY, random_segment(4)))
    with pytest.raises(TransferError, match=f"^{count} bytes came of a piece of 1152$") as caught:
        buffer.fill(bytes(count))
        buffer.segment()
    assert caught.value.code == "DATA_LOSS"


@pytest.mark.parametrize(
    "array",
    [
        pb.Array(name="k", dtype="object", shape=[1, 1, 1, 1]),
        pb.Array(name="k", dtype="float64", shape=[1, 1, 1, 1]),
        pb.Array(name="start", dtype="float32", shape=[1, 1, 1, 1]),
    ],
)
def test_arrays_that_no_piece_has(array: pb.Array) -> None:
    with pytest.raises(TransferError, match="no array") as caught:
        ticket_from_proto(pb.PrefillResponse(ticket=KEY, arrays=[array]))
    assert caught.value.code == "DATA_LOSS"


def test_arrays_that_contradict_each_other() -> None:
    ticket = Ticket.of(KEY, random_segment(4, dtype="int8"))
    for arrays in (
        ticket.arrays[1:],
        ticket.arrays[:2],
        (replace(ticket.arrays[0], shape=(1, 2)), *ticket.arrays[1:]),
    ):
        buffer = SegmentBuffer(replace(ticket, arrays=arrays))
        buffer.fill(bytes(sum(array.nbytes for array in arrays)))
        with pytest.raises(TransferError) as caught:
            buffer.segment()
        assert caught.value.code == "DATA_LOSS"
