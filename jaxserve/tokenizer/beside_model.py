"""Tokens of a SentencePiece model and of the files beside it."""

from collections.abc import Mapping
from typing import Final

from sentencepiece import SentencePieceProcessor

from jaxserve.tokenizer.declared import DeclaredToken
from jaxserve.tokenizer.model_ids import MissingTokens, split_at
from jaxserve.tokenizer.protocol import TokenizerError
from jaxserve.tokenizer.sentencepiece_proto import user_defined_ids
from jaxserve.tokenizer.settings import SETTINGS_FILE, TokenizerSettings

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
        id = piece_id(processor, token.name)
        counts = token.id is not None or settings.adds(token.name, id is not None)
        if token.name in names or not counts:
            continue
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


def named_id(
    processor: SentencePieceProcessor,
    declared: Mapping[int, DeclaredToken],
    name: str | None,
    default: int,
) -> int | None:
    """Return the id of the token that the settings name, or the default; -1 is none.

    Raises:
        TokenizerError: Neither the model nor a file beside it has the token.
    """
    if name is None:
        return default if default >= 0 else None
    ids = {token.name: token_id for token_id, token in declared.items()}
    token_id = ids.get(name, piece_id(processor, name))
    if token_id is None:
        raise TokenizerError(
            f"{SETTINGS_FILE}: {name!r} is not in {MODEL_FILE}; correct it or add a tokenizer.json"
        )
    return token_id


def missing_tokens(
    processor: SentencePieceProcessor, declared: Mapping[int, DeclaredToken], model_ids: int | None
) -> MissingTokens:
    """Return the tokens that a model with so many ids does not have; unused pieces are none.

    Raises:
        TokenizerError: One of them is a piece of text.
    """
    if model_ids is None:
        return MissingTokens()
    ids = {token.name: token_id for token_id, token in declared.items()}
    found_by_name = set(ids)
    pieces = range(model_ids, processor.vocab_size())
    if pieces:
        symbols = set(user_defined_ids(processor.serialized_model_proto()))
        used = [i for i in pieces if not processor.is_unused(i)]
        ids |= {processor.id_to_piece(i): i for i in used}
        named = [i for i in used if processor.is_control(i) or i in symbols]
        found_by_name.update(map(processor.id_to_piece, named))
    return split_at(model_ids, ids, found_by_name, MODEL_FILE)
