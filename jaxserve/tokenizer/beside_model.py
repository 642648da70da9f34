"""Tokens that files beside a SentencePiece model declare."""

from typing import Final

from sentencepiece import SentencePieceProcessor

from jaxserve.tokenizer.declared import DeclaredToken
from jaxserve.tokenizer.settings import TokenizerSettings

MODEL_FILE: Final = "tokenizer.model"


def tokens_beside(
    processor: SentencePieceProcessor, settings: TokenizerSettings
) -> dict[int, DeclaredToken]:
    """Return the declared tokens by the ids that transformers 5 gives them.

    A token that the model has keeps its id. A new one gets the id after the last.

    Raises:
        TokenizerError: A token would get another id than declared.
    """
    added = dict[int, DeclaredToken]()
    names = set[str]()
    last = processor.vocab_size() - 1
    for token in (*settings.declared, *settings.listed):
        if token.name in names or not _counts(token, processor, settings):
            continue
        id = piece_id(processor, token.name)
        if id is None:
            last += 1
            id = last
        token.require_id(id, MODEL_FILE)
        added[id] = token
        names.add(token.name)
    return added


def piece_id(processor: SentencePieceProcessor, name: str) -> int | None:
    """Return the id of a piece, or None where the model has none of this name."""
    token_id = processor.piece_to_id(name)
    is_other = processor.is_unknown(token_id) and name != processor.id_to_piece(token_id)
    return None if is_other else token_id


def _counts(
    token: DeclaredToken, processor: SentencePieceProcessor, settings: TokenizerSettings
) -> bool:
    """Return whether a token is added.

    A letter that is only named is not: it would vanish from every answer. Nor are begin and end
    tokens without an id that the model lacks, which is an error elsewhere.
    """
    if token.id is not None:
        return True
    if len(token.name) == 1:
        return False
    needed = token.name in (settings.bos_token, settings.eos_token)
    return not needed or piece_id(processor, token.name) is not None
