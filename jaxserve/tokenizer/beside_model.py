"""Tokens that files beside a SentencePiece model declare."""

from dataclasses import dataclass
from typing import Final

from sentencepiece import SentencePieceProcessor

from jaxserve.tokenizer.declared import DeclaredToken
from jaxserve.tokenizer.settings import TokenizerSettings
from jaxserve.tokenizer.special import NamedToken

MODEL_FILE: Final = "tokenizer.model"


@dataclass(frozen=True)
class AddedToken:
    """A declared token with the id that it has."""

    declared: DeclaredToken
    id: int

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def special(self) -> bool:
        return self.declared.special

    @property
    def named(self) -> NamedToken:
        token = self.declared
        return NamedToken(token.name, self.id, token.lstrip, token.rstrip, token.single_word)


def tokens_beside(
    processor: SentencePieceProcessor, settings: TokenizerSettings
) -> tuple[AddedToken, ...]:
    """Return the declared tokens, as transformers 5 adds them.

    A token that the model has keeps its id. A new one gets the id after the last.

    Raises:
        TokenizerError: A token would get another id than declared.
    """
    added = dict[str, AddedToken]()
    last = processor.vocab_size() - 1
    for token in (*settings.declared, *settings.listed):
        if token.name in added or not _counts(token, processor, settings):
            continue
        id = piece_id(processor, token.name)
        if id is None:
            last += 1
            id = last
        token.require_id(id, MODEL_FILE)
        added[token.name] = AddedToken(token, id)
    return tuple(added.values())


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
