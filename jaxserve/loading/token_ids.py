"""Token ids that a checkpoint's tokenizer and its model share, and those that end an answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.loading.spec import Checkpoint
from jaxserve.request import MAX_EOS_IDS
from jaxserve.tokenizer import Tokenizer, load_tokenizer

MAX_NAMED = 4  # tokens that a line names


@dataclass(frozen=True)
class TokenIds:
    """Tokens of a model.

    tokenizer: has ids of the model alone. eos_ids: end tokens, ids of the model. notes: lines on
    tokens that the files name but the model does not have.
    """

    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    notes: tuple[str, ...]


def read_token_ids(folder: Path, checkpoint: Checkpoint, vocab_size: int) -> TokenIds:
    """Read the tokenizer and the end tokens of a checkpoint whose model has vocab_size ids.

    End tokens are those of generation_config.json, else config.json, else the tokenizer. A file
    does not count if it names some of which the model has none.

    Raises:
        ModelError: A file names end tokens that are no ids, or too many.
        TokenizerError: The tokenizer's files cannot be read, or are those of another model.
    """
    tokenizer = load_tokenizer(folder, vocab_size)
    eos_ids, absent = _end_tokens(checkpoint, vocab_size)
    if eos_ids is None:
        eos_ids = tokenizer.eos_ids
    missing = tokenizer.missing_tokens
    notes = (*_note_on_missing(missing, vocab_size), *_note_on_ends(missing, absent, eos_ids))
    return TokenIds(tokenizer, eos_ids, notes)


def _end_tokens(
    checkpoint: Checkpoint, vocab_size: int
) -> tuple[tuple[int, ...] | None, list[int]]:
    """Return the end tokens of the file that counts, and those that the model does not have."""
    absent = list[int]()
    for source in (checkpoint.generation_config, checkpoint.config):
        named = source.get("eos_token_id")
        if named is None:
            continue
        ids = named if isinstance(named, list) else [named]
        _check_end_tokens(ids, vocab_size)
        absent += [token for token in ids if token >= vocab_size]
        kept = tuple(token for token in ids if token < vocab_size)
        if kept or not ids:
            return kept, absent
    return None, absent


def _check_end_tokens(ids: list[Any], vocab_size: int) -> None:
    if len(ids) > MAX_EOS_IDS or not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            f"eos_token_id {ids!r}: at most {MAX_EOS_IDS} ids of the vocabulary (0 to "
            f"{vocab_size - 1})"
        )


def _note_on_missing(missing: Mapping[str, int], vocab_size: int) -> tuple[str, ...]:
    if not missing:
        return ()
    first = sorted(missing.items(), key=lambda token: token[1])[:MAX_NAMED]
    names = ", ".join(f"{name!r} ({token_id})" for name, token_id in first)
    more = len(missing) - len(first)
    others = f" and {more} more" if more else ""
    return (
        f"the tokenizer's files have {names}{others}, but the model's ids are 0 to "
        f"{vocab_size - 1}: such names are text",
    )


def _note_on_ends(
    missing: Mapping[str, int], absent: list[int], eos_ids: tuple[int, ...]
) -> tuple[str, ...]:
    if not absent and (eos_ids or not missing):
        return ()
    ends = f"answers end with {list(eos_ids)}" if eos_ids else "no token ends an answer"
    beyond = f"the model does not have the end tokens {sorted(set(absent))}: " if absent else ""
    return (f"{beyond}{ends}",)
