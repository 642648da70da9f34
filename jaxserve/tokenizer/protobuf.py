"""What a SentencePiece model says and its library does not tell: read from the protobuf, sentencepiece_model.proto."""

from collections.abc import Iterator
from dataclasses import dataclass

PIECES, PIECE_TYPE, USER_DEFINED = 1, 3, 4  # ModelProto.pieces, SentencePiece.type, SentencePiece.Type
TRAINER, MODEL_TYPE, UNIGRAM, BPE = 2, 3, 1, 2  # ModelProto.trainer_spec, its model_type, two of its values
SPACE_AFTER = 24  # trainer_spec.treat_whitespace_as_suffix
NORMALIZER, CHARSMAP, DUMMY_PREFIX, EXTRA_SPACES, ESCAPE_SPACES = 3, 2, 3, 4, 5  # ModelProto.normalizer_spec
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types (protobuf.dev, Encoding)


def user_defined_ids(model: bytes) -> list[int]:
    """Ids of the symbols that the model was told to keep whole; `model` is one that the library has accepted."""
    pieces = (piece for number, piece in _fields(model) if number == PIECES)
    return [token_id for token_id, piece in enumerate(pieces) if isinstance(piece, bytes) and _is_user_defined(piece)]


@dataclass(frozen=True)
class Rules:
    """bpe: how a model cuts its text. rewrites: more than spaces change before. dummy_prefix: a space is put first."""

    bpe: bool
    rewrites: bool
    dummy_prefix: bool


def rules_of(model: bytes) -> Rules:
    """`model` is one that the library has accepted. What it leaves out has the default of the protobuf."""
    parts = {number: value for number, value in _fields(model) if number != PIECES and isinstance(value, bytes)}
    trainer, normalizer = (dict(_fields(parts.get(number, b""))) for number in (TRAINER, NORMALIZER))
    return Rules(
        bpe=trainer.get(MODEL_TYPE, UNIGRAM) == BPE,
        rewrites=bool(
            normalizer.get(CHARSMAP)
            or normalizer.get(EXTRA_SPACES, True)
            or not normalizer.get(ESCAPE_SPACES, True)
            or trainer.get(SPACE_AFTER)
        ),
        dummy_prefix=bool(normalizer.get(DUMMY_PREFIX, True)),
    )


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
