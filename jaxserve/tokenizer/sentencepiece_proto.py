"""What a SentencePiece model says and its library does not tell, read with the library's messages.

Every `model` here is one that the library has accepted.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rules:
    """How a model treats its text.

    bpe: how it cuts it. rewrites: more than spaces change before.
    dummy_prefix: a space is put first. single_spaces: runs of spaces become one, and none stays
    where a text begins or ends.
    """

    bpe: bool
    rewrites: bool
    dummy_prefix: bool
    single_spaces: bool


def rules_of(model: bytes) -> Rules:
    """The model's own, with the protobuf's defaults for what it leaves out."""
    messages = _messages()
    parsed = messages.ModelProto.FromString(model)
    trainer, normalizer = parsed.trainer_spec, parsed.normalizer_spec
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
    """Ids of the symbols that the model was told to keep whole."""
    proto = _messages().ModelProto
    pieces = proto.FromString(model).pieces
    return [i for i, piece in enumerate(pieces) if piece.type == proto.SentencePiece.USER_DEFINED]


def without_dummy_prefix(model: bytes) -> bytes:
    """A model that differs in nothing else, for text that opens nothing."""
    parsed = _messages().ModelProto.FromString(model)
    parsed.normalizer_spec.add_dummy_prefix = False
    return parsed.SerializeToString()


def _messages() -> Any:
    """The generated module; nothing else needs protobuf where there is no server."""
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2
