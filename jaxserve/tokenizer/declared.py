"""Tokens that the files beside a tokenizer declare: added_tokens.json, special_tokens_map.json and
tokenizer_config.json.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.tokenizer.protocol import TokenizerError
from jaxserve.tokenizer.special import NamedToken

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ID = re.compile("[0-9]{1,10}")
FIELDS = frozenset(("content", "id", "__type", *FLAGS))


@dataclass(frozen=True)
class DeclaredToken:
    """A token that a file declares beside the tokenizer's own."""

    name: str
    id: int | None  # None where the file gives only the name
    source: str  # name of the file
    special: bool = False  # the token decodes to no text
    normalized: bool = False  # the token is found in normalized text
    lstrip: bool = False  # the token swallows white space on its left
    rstrip: bool = False  # the token swallows white space on its right
    single_word: bool = False  # the token is not found inside a word

    def as_special(self) -> "DeclaredToken":
        return replace(self, special=True)

    def with_id(self, id: int) -> NamedToken:
        """Return what is looked for in a text."""
        return NamedToken(self.name, id, self.lstrip, self.rstrip, self.single_word)

    def require_id(self, actual: int | None, tokenizer_file: str) -> None:
        """Raise TokenizerError unless `actual`, the token's id in the tokenizer, is as declared.

        A token that a tokenizer lacks gets the id after the last one, as in transformers.
        """
        if self.id is None or self.id == actual:
            return
        raise TokenizerError(
            f"{self.source}: {self.name!r} has the id {self.id}, but {tokenizer_file} gives it "
            f"{actual}; copy both files again from the checkpoint's source"
        )


def token_of(
    path: Path, field: str, value: Any, id: int | None = None, special: bool = False
) -> DeclaredToken:
    """Return the token that a JSON value declares: a name, or an object with the name as content.

    As in the tokenizers library, a token is normalized where the object does not say it and the
    token is not special.

    Args:
        special: Value where the object does not say it.

    Raises:
        TokenizerError: The value has another form, or fields that no published file has.
    """
    if isinstance(value, str):
        value = {"content": value}
    name = value.get("content") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise TokenizerError(
            f"{path}: {field} is {value!r:.80}; expected a string that names a token, or an object "
            f'{{"content": string}}'
        )
    _check_unicode(path, name)
    unknown = sorted(set(value) - FIELDS)
    if unknown:
        raise TokenizerError(
            f"{path}: {field} has the field {unknown[0]!r}, which is not understood; remove it if "
            f"it does not count"
        )
    flags = {flag: _flag(path, field, value, flag) for flag in FLAGS if value.get(flag) is not None}
    special = flags.pop("special", special)
    normalized = flags.pop("normalized", not special)
    return DeclaredToken(name, id, path.name, special, normalized, **flags)


def tokens_with_ids(path: Path, field: str, tokens: Any) -> tuple[DeclaredToken, ...]:
    """Return the tokens of an object {id: token}, in the order of their ids.

    Raises:
        TokenizerError: It is no such object.
    """
    if not isinstance(tokens, Mapping) or not all(map(ID.fullmatch, tokens)):
        raise TokenizerError(
            f"{path}: {field} is {tokens!r:.80}; expected an object with ids and their tokens"
        )
    ids = sorted(tokens, key=int)
    return tuple(token_of(path, f"{field}[{id}]", tokens[id], int(id)) for id in ids)


def tokens_by_name(
    path: Path, names: Mapping[str, Any], kept: Collection[str] = ()
) -> tuple[DeclaredToken, ...]:
    """Return the tokens of added_tokens.json, an object {name: id}, in the order of their ids.

    Args:
        kept: Names of the tokens that are not normalized; the file cannot say so.

    Raises:
        TokenizerError: A value is no id.
    """
    for name, id in names.items():
        if type(id) is not int or id < 0 or not name:
            raise TokenizerError(f"{path}: {name!r} has the id {id!r}; expected a number from 0 on")
        _check_unicode(path, name)
    return tuple(
        DeclaredToken(name, names[name], path.name, normalized=name not in kept)
        for name in sorted(names, key=lambda name: names[name])
    )


def _check_unicode(path: Path, name: str) -> None:
    """Raise TokenizerError for a name with half a surrogate pair, which JSON can write."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise TokenizerError(
            f"{path}: the token {name!r} is not valid Unicode; copy the file again"
        ) from None


def _flag(path: Path, field: str, value: Mapping[str, Any], flag: str) -> bool:
    if not isinstance(value[flag], bool):
        raise TokenizerError(
            f"{path}: {flag} of {field} is {value[flag]!r}; expected true or false"
        )
    return value[flag]
