"""Tokens that fields of the files beside a tokenizer name, alone or in lists."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.tokenizer.companion_fields import LISTS, NAMES, names_token
from jaxserve.tokenizer.declared import DeclaredToken, token_of
from jaxserve.tokenizer.protocol import TokenizerError


def named_tokens(
    path: Path, fields: Mapping[str, Any], special: bool = False
) -> dict[str, DeclaredToken]:
    """Return the tokens of fields such as eos_token, and of objects with such fields.

    Args:
        special: Value for tokens that are objects and do not say it.
    """
    named = {name: value for name, value in fields.items() if names_token(name, value)}
    for name in LISTS:
        if isinstance(fields.get(name), dict):
            named |= fields[name]
    tokens = {
        name: token_of(path, name, value, special=special or isinstance(value, str))
        for name, value in named.items()
    }
    return in_order(tokens)


def in_order(named: Mapping[str, DeclaredToken]) -> dict[str, DeclaredToken]:
    """Return the named tokens, those of NAMES first, in the order in which they get ids."""
    ordered = [*(name for name in NAMES if name in named), *named]
    return {name: named[name] for name in ordered}


def listed_tokens(
    path: Path, fields: Mapping[str, Any], special: bool = False, names: Sequence[str] = LISTS
) -> dict[str, DeclaredToken]:
    """Return the tokens in lists such as additional_special_tokens, by their names.

    Args:
        special: Value for tokens that are objects and do not say it.
        names: Names of the lists.
    """
    tokens = dict[str, DeclaredToken]()
    for name in names:
        value = fields.get(name) or []
        if not isinstance(value, list | dict):
            raise TokenizerError(f"{path}: {name} is {value!r:.80}; expected a list of tokens")
        for entry in value if isinstance(value, list) else []:
            token = token_of(path, name, entry, special=special or isinstance(entry, str))
            tokens.setdefault(token.name, token)
    return tokens


def special_among(
    tokens: tuple[DeclaredToken, ...], names: Collection[str]
) -> tuple[DeclaredToken, ...]:
    """Return the tokens, special where they have one of the names."""
    return tuple(token.as_special() if token.name in names else token for token in tokens)


def kept_as_written(config: Mapping[str, Any], old_map: Mapping[str, Any]) -> frozenset[str]:
    """Return the names in added_tokens.json that are looked for in text as it is written.

    All others are looked for in normalized text. transformers decides by which fields name a token,
    and in which form, when it reads added_tokens.json.
    """
    plain = [config.get(name) for name in NAMES]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(name)
        plain += value if isinstance(value, list) else []
    mapped = [old_map.get(name) for name in NAMES]
    extra = old_map.get("extra_special_tokens")
    mapped += extra if isinstance(extra, list) else []
    named = (value.get("content") if isinstance(value, dict) else value for value in mapped)
    return frozenset(name for name in (*plain, *named) if isinstance(name, str))
