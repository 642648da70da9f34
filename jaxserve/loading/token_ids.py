"""Token ids that a checkpoint's tokenizer and its model share, and those that end an answer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.loading.spec import Checkpoint
from jaxserve.models.families.text_part import with_text_fields
from jaxserve.request import MAX_EOS_IDS
from jaxserve.tokenizer import Tokenizer, load_tokenizer

MAX_NAMED = 4  # tokens that a line names
# In OpenAI's Harmony format these end an answer, whatever the files say of them.
HARMONY_MARKS = frozenset({"<|channel|>", "<|message|>"})
HARMONY_ENDS = ("<|call|>", "<|return|>")


@dataclass(frozen=True)
class TokenIds:
    """Tokens of a model."""

    tokenizer: Tokenizer  # has ids of the model alone
    eos_ids: tuple[int, ...]  # end tokens, ids of the model
    notes: tuple[str, ...]  # lines on tokens that the files name but the model does not have


def read_token_ids(folder: Path, checkpoint: Checkpoint, vocab_size: int) -> TokenIds:
    """Read the tokenizer and the end tokens of a checkpoint whose model has vocab_size ids.

    End tokens are those of generation_config.json, else of config.json, and the tokenizer's own,
    and those of the Harmony format where the tokenizer has its marks. A
    file does not count if it names some of which the model has none; one that names an empty list
    says that there are none.

    Raises:
        ModelError: A file names end tokens that are no ids, or too many.
        TokenizerError: The tokenizer's files cannot be read, or are those of another model.
    """
    tokenizer = load_tokenizer(folder, vocab_size)
    named = _end_tokens(checkpoint, vocab_size)
    eos_ids = named.all(tokenizer)
    _check_end_tokens(list(eos_ids), vocab_size)
    missing = tokenizer.missing_tokens
    notes = (
        *_note_on_missing(missing, vocab_size),
        *_note_on_absent(missing, named.absent, eos_ids),
        *_notes_on_sources(named, tokenizer),
    )
    return TokenIds(tokenizer, eos_ids, notes)


@dataclass(frozen=True)
class _EndTokens:
    """End tokens of generation_config.json and config.json."""

    source: str | None  # file that counts; None where neither does
    ids: tuple[int, ...]  # end tokens that `source` names, as far as the model has them
    absent: list[int]  # end tokens that the model does not have
    # End tokens of config.json that generation_config.json does not name.
    left_out: tuple[int, ...] = ()

    def all(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids that end an answer, with those of the tokenizer."""
        if self.source and not self.ids:  # the publisher says that there are none
            return ()
        return tuple(dict.fromkeys((*self.ids, *tokenizer.eos_ids, *_harmony_ends(tokenizer))))


def _harmony_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    special = tokenizer.special_tokens
    if not special.keys() >= HARMONY_MARKS:
        return ()
    return tuple(special[name] for name in HARMONY_ENDS if name in special)


def _end_tokens(checkpoint: Checkpoint, vocab_size: int) -> _EndTokens:
    absent = list[int]()
    counted: _EndTokens | None = None
    for source, fields in (
        ("generation_config.json", checkpoint.generation_config),
        ("config.json", with_text_fields(checkpoint.config)),
    ):
        named = fields.get("eos_token_id")
        if named is None:
            continue
        ids = named if isinstance(named, list) else [named]
        if counted:
            left_out = _left_out(ids, counted.ids, vocab_size)
            return replace(counted, left_out=left_out)
        _check_end_tokens(ids, vocab_size)
        absent += [token for token in ids if token >= vocab_size]
        kept = tuple(token for token in ids if token < vocab_size)
        if kept or not ids:
            counted = _EndTokens(source, kept, absent)
    return counted or _EndTokens(None, (), absent)


def _left_out(ids: list[Any], counted: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Return the ids of a file that does not count, as far as another one does not name them."""
    own = (token for token in ids if type(token) is int and 0 <= token < vocab_size)
    return tuple(token for token in own if token not in counted)


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


def _note_on_absent(
    missing: Mapping[str, int], absent: list[int], eos_ids: tuple[int, ...]
) -> tuple[str, ...]:
    if not absent and (eos_ids or not missing):
        return ()
    ends = f"answers end with {list(eos_ids)}" if eos_ids else "no token ends an answer"
    beyond = f"the model does not have the end tokens {sorted(set(absent))}: " if absent else ""
    return (f"{beyond}{ends}",)


def _notes_on_sources(named: _EndTokens, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return lines on end tokens that one source has and another one lacks."""
    notes = list[str]()
    own = [token for token in tokenizer.eos_ids if token not in named.ids]
    if named.ids and own:
        notes.append(
            f"answers end with {_named(named.ids, tokenizer)}, as {named.source} says, and with "
            f"{_named(own, tokenizer)}, the tokenizer's end token"
        )
    if named.source and not named.ids:
        others = {*named.left_out, *tokenizer.eos_ids}
        beside = f", and not {_named(sorted(others), tokenizer)}" if others else ""
        return (f"no token ends an answer, as {named.source} says{beside}",)
    left_out = [token for token in named.left_out if token not in tokenizer.eos_ids]
    if left_out:
        notes.append(
            f"{_named(left_out, tokenizer)} of config.json ends no answer, since {named.source} "
            f"does not name it"
        )
    return tuple(notes)


def _named(ids: Iterable[int], tokenizer: Tokenizer) -> str:
    return ", ".join(f"{tokenizer.token_text(token)!r} ({token})" for token in ids)
