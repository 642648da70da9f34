"""Token ids that a checkpoint's tokenizer and its model share, and those that end an answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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

    End tokens are those of generation_config.json, else config.json, else the tokenizer. The first
    of these counts that names one which the model has.

    Raises:
        ModelError: A file names end tokens that neither the model nor the tokenizer has, or too
            many.
        TokenizerError: The tokenizer's files cannot be read, or are those of another model.
    """
    tokenizer = load_tokenizer(folder, vocab_size)
    missing = tokenizer.missing_tokens
    named = _named_end_tokens(checkpoint, vocab_size, missing)
    kept = [[token for token in ids if token < vocab_size] for ids in named]
    eos_ids = next((tuple(ids) for ids in kept if ids), tokenizer.eos_ids)
    notes = (*_note_on_missing(missing, vocab_size), *_note_on_ends(named, eos_ids, vocab_size))
    return TokenIds(tokenizer, eos_ids, notes)


def _named_end_tokens(
    checkpoint: Checkpoint, vocab_size: int, missing: Mapping[str, int]
) -> list[list[int]]:
    """Return the end tokens of each file that names them, in the order in which the files count."""
    known = {*range(vocab_size), *missing.values()}
    named = list[list[int]]()
    for source in (checkpoint.generation_config, checkpoint.config):
        ids = source.get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if len(ids) > MAX_EOS_IDS or not all(type(i) is int and i in known for i in ids):
            raise ModelError(
                f"eos_token_id {ids!r}: at most {MAX_EOS_IDS} ids of the vocabulary (0 to "
                f"{vocab_size - 1})"
            )
        named.append(ids)
    return named


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
    named: list[list[int]], eos_ids: tuple[int, ...], vocab_size: int
) -> tuple[str, ...]:
    absent = sorted({token for ids in named for token in ids if token >= vocab_size})
    if not absent:
        return ()
    ends = f"answers end with {list(eos_ids)}" if eos_ids else "no token ends an answer"
    return (f"the model does not have the end tokens {absent}: {ends}",)
