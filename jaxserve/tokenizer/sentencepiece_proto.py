"""Properties of a SentencePiece model that the library's processor does not expose.

They are read with the library's protobuf messages. Every `model` here has been accepted by the
library before.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rules:
    """How a model processes text."""

    bpe: bool  # text is split by byte pair encoding
    rewrites: bool  # normalization changes more than spaces
    dummy_prefix: bool  # a space is added at the beginning
    single_spaces: bool  # runs of spaces become one, and spaces at both ends are dropped


def rules_of(model: bytes) -> Rules:
    """Return the rules of a model, with protobuf defaults for absent fields."""
    messages = _messages()
    parsed = messages.ModelProto.FromString(model)
    trainer = parsed.trainer_spec
    normalizer = parsed.normalizer_spec
    return Rules(
        bpe=trainer.model_type == messages.TrainerSpec.BPE,
        rewrites=bool(
            normalizer.precompiled_charsmap
            or normalizer.remove_extra_whitespaces
            or not normalizer.escape_whitespaces
            or trainer.treat_whitespace_as_suffix
        ),
        dummy_prefix=normalizer.add_dummy_prefix,
        single_spaces=normalizer.remove_extra_whitespaces,
    )


def user_defined_ids(model: bytes) -> list[int]:
    """Return the ids of user-defined symbols, which the model keeps whole."""
    proto = _messages().ModelProto
    pieces = proto.FromString(model).pieces
    return [i for i, piece in enumerate(pieces) if piece.type == proto.SentencePiece.USER_DEFINED]


def with_dummy_prefix(model: bytes, added: bool) -> bytes:
    """Return the model with add_dummy_prefix on or off."""
    parsed = _messages().ModelProto.FromString(model)
    parsed.normalizer_spec.add_dummy_prefix = added
    return parsed.SerializeToString()


def with_control(model: bytes, ids: Iterable[int]) -> bytes:
    """Return the model with these pieces as control tokens, which no text becomes."""
    proto = _messages().ModelProto
    parsed = proto.FromString(model)
    for id in ids:
        parsed.pieces[id].type = proto.SentencePiece.CONTROL
    return parsed.SerializeToString()


def _messages() -> Any:
    """Import the generated module, late: without a server nothing else needs protobuf."""
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2
