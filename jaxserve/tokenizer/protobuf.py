"""What a SentencePiece model says and its library does not tell: read from the protobuf, sentencepiece_model.proto."""

from collections.abc import Iterator

PIECES, PIECE_TYPE, USER_DEFINED = 1, 3, 4  # ModelProto.pieces, SentencePiece.type, SentencePiece.Type
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types (protobuf.dev, Encoding)


def user_defined_ids(model: bytes) -> list[int]:
    """Ids of the symbols that the model was told to keep whole; `model` is one that the library has accepted."""
    pieces = (piece for number, piece in _fields(model) if number == PIECES)
    return [token_id for token_id, piece in enumerate(pieces) if isinstance(piece, bytes) and _is_user_defined(piece)]


def _is_user_defined(piece: bytes) -> bool:
    return any(field == (PIECE_TYPE, USER_DEFINED) for field in _fields(piece))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields, in their order."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if wire == LENGTH else ({FIXED64: 8, FIXED32: 4}[wire], at)
            value, at = message[at : at + size], at + size
        yield number, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, seven bits a byte, the lowest first; and where the next thing begins."""
    value = shift = 0
    while message[at] >= 0x80:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1
