"""Reads the files beside a tokenizer.

The files are tokenizer_config.json, special_tokens_map.json and added_tokens.json. They declare
tokens as transformers 5 reads them: added_tokens_decoder of tokenizer_config.json stands for all of
them, and only without it the two older files count.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from jaxserve.tokenizer.companion_fields import NAMES, USED, check_fields, flag, read_object
from jaxserve.tokenizer.declared import DeclaredToken, token_of, tokens_by_name, tokens_with_ids
from jaxserve.tokenizer.protocol import TokenizerError
from jaxserve.tokenizer.token_fields import (
    in_order,
    kept_as_written,
    listed_tokens,
    named_tokens,
    special_among,
)

SETTINGS_FILE: Final = "tokenizer_config.json"
MAP_FILE: Final = "special_tokens_map.json"
ADDED_FILE: Final = "added_tokens.json"

JSON_FILE: Final = "tokenizer.json"
# Classes of transformers, without their ending Fast, that look at add_prefix_space.
PREFIX_SPACE_CLASSES: Final = frozenset(
    """
    LlamaTokenizer CodeLlamaTokenizer GPT2Tokenizer GPTNeoXTokenizer Qwen2Tokenizer CodeGenTokenizer
    CohereTokenizer RobertaTokenizer XLMRobertaTokenizer WhisperTokenizer
    """.split()
)


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings in the files beside a tokenizer; None where they leave it to the tokenizer."""

    # Fields such as eos_token, with the names of their tokens, which are special.
    names: Mapping[str, str] = field(default_factory=dict)
    empty: frozenset[str] = frozenset()  # such fields that are the empty string: there is no token
    # Names that additional_special_tokens lists, for chat templates of transformers 4.
    additional: tuple[str, ...] = ()
    declared: tuple[DeclaredToken, ...] = ()  # tokens with ids, in the order of the ids
    # Tokens that a file names without an id, those of fields such as eos_token first.
    listed: tuple[DeclaredToken, ...] = ()
    # Declared tokens count before those that tokenizer.json has at the same ids.
    overrides: bool = False
    unused: tuple[DeclaredToken, ...] = ()  # tokens of added_tokens.json that do not count
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None  # text gets a space before it
    tokenizer_code: str | None = None  # class in code beside the tokenizer, with its module
    # In a SentencePiece model, text after a special token gets a dummy space too.
    legacy: bool | None = None
    chat_template: Any = None  # as the file has it
    control_tokens: frozenset[str] = frozenset()  # names of the chat template's own tokens

    @property
    def bos_token(self) -> str | None:
        return self.names.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.names.get("eos_token")

    def adds(self, name: str, is_known: bool) -> bool:
        """Return whether a token that is only named is added to a tokenizer that may know it.

        A letter is not: it would vanish from every answer. Nor are begin and end tokens that the
        tokenizer lacks, which is an error elsewhere.
        """
        is_needed = name in (self.bos_token, self.eos_token)
        return len(name) != 1 and (is_known or not is_needed)


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the files beside the tokenizer of a checkpoint folder; none of them has to be there.

    Raises:
        TokenizerError: A file is not JSON, a field has another type than Hugging Face writes, or a
            field is not understood.
    """
    path = folder / SETTINGS_FILE
    config = read_object(path)
    check_fields(path, config, USED)
    tokens = _tokens(folder, config)
    old_map = read_object(folder / MAP_FILE)
    return replace(
        tokens,
        additional=_additional(path, config, old_map),
        declared=special_among(tokens.declared, tokens.names.values()),
        empty=_empty(config, old_map),
        add_bos_token=flag(path, config, "add_bos_token"),
        add_eos_token=flag(path, config, "add_eos_token"),
        add_prefix_space=_prefix_space(path, config),
        tokenizer_code=_tokenizer_code(config),
        legacy=flag(path, config, "legacy"),
        chat_template=config.get("chat_template"),
        control_tokens=_control_tokens(path, config),
    )


def _tokens(folder: Path, config: Mapping[str, Any]) -> TokenizerSettings:
    """Return what the files say about tokens."""
    old_map = read_object(folder / MAP_FILE)
    check_fields(folder / MAP_FILE, old_map, frozenset())
    added = read_object(folder / ADDED_FILE)
    if config.get("added_tokens_decoder") is not None:
        return _by_decoder(folder, config, old_map, added)
    return _by_older_files(folder, config, old_map, added)


def _by_decoder(
    folder: Path, config: Mapping[str, Any], old_map: Mapping[str, Any], added: Mapping[str, Any]
) -> TokenizerSettings:
    """Return the tokens of a tokenizer_config.json that declares them all."""
    path = folder / SETTINGS_FILE
    declared = tokens_with_ids(path, "added_tokens_decoder", config["added_tokens_decoder"])
    known = {token.name for token in declared}
    named = named_tokens(path, config)
    names = _names(named)
    old_end = named_tokens(folder / MAP_FILE, old_map).get("eos_token")
    if old_end:  # something has to end an answer
        names.setdefault("eos_token", old_end.name)
    return TokenizerSettings(
        names=names,
        declared=declared,
        listed=_without_ids(named, listed_tokens(path, config)),
        overrides=True,
        unused=tuple(t for t in tokens_by_name(folder / ADDED_FILE, added) if t.name not in known),
    )


def _by_older_files(
    folder: Path, config: Mapping[str, Any], old_map: Mapping[str, Any], added: Mapping[str, Any]
) -> TokenizerSettings:
    """Return the tokens of special_tokens_map.json and added_tokens.json, and the names of both.

    A field of special_tokens_map.json that is null takes that of tokenizer_config.json away.
    """
    path = folder / SETTINGS_FILE
    map_path = folder / MAP_FILE
    kept = {name: t for name, t in named_tokens(path, config).items() if name not in old_map}
    named = in_order(kept | named_tokens(map_path, old_map, special=True))
    listed = listed_tokens(path, config)
    old_listed = listed_tokens(map_path, old_map, special=True)
    special = [token.name for token in (listed | old_listed).values() if token.special]
    declared = tokens_by_name(folder / ADDED_FILE, added, kept_as_written(config, old_map))
    if not _map_adds(folder, config, old_map):
        old_listed = listed_tokens(map_path, old_map, special=True, names=("extra_special_tokens",))
    return TokenizerSettings(
        names=_names(named),
        declared=special_among(declared, special),
        listed=_without_ids(named, listed | old_listed),
    )


def _map_adds(folder: Path, config: Mapping[str, Any], old_map: Mapping[str, Any]) -> bool:
    """Return whether additional_special_tokens of special_tokens_map.json makes new tokens.

    In transformers it does so only beside a tokenizer.json, and only if no other file has a list.
    """
    extra = [fields.get("extra_special_tokens") for fields in (config, old_map)]
    others = "additional_special_tokens" in config or any(isinstance(e, list) for e in extra)
    return os.path.lexists(folder / JSON_FILE) and not others


def _names(named: Mapping[str, DeclaredToken]) -> dict[str, str]:
    return {field: token.name for field, token in named.items()}


def _without_ids(
    named: Mapping[str, DeclaredToken], listed: Mapping[str, DeclaredToken]
) -> tuple[DeclaredToken, ...]:
    return (*(token.as_special() for token in named.values()), *listed.values())


def affix(
    flag: bool | None, token_id: int | None, default: tuple[int, ...], name: str
) -> tuple[int, ...]:
    """Return the ids to add at one end of a text: the default where the flag is not set.

    Raises:
        TokenizerError: The flag called `name` asks for a token that the tokenizer does not have.
    """
    if flag is None:
        return default
    if flag and token_id is None:
        token = name.removeprefix("add_")
        raise TokenizerError(
            f"{SETTINGS_FILE}: {name} is true, but no {token} is known; name it or set {name} false"
        )
    return (token_id,) if flag and token_id is not None else ()


def _empty(config: Mapping[str, Any], old_map: Mapping[str, Any]) -> frozenset[str]:
    """Return the fields that are the empty string."""
    fields = _in_force(config, old_map)
    return frozenset(name for name in NAMES if fields.get(name) == "")


def _additional(
    path: Path, config: Mapping[str, Any], old_map: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the names of the special tokens beside those of fields such as eos_token.

    transformers 5 writes them as extra_special_tokens.
    """
    fields = _in_force(config, old_map)
    given = fields.get("additional_special_tokens") or fields.get("extra_special_tokens")
    entries = given if isinstance(given, list) else []
    names = (token_of(path, "additional_special_tokens", entry).name for entry in entries)
    return tuple(dict.fromkeys(names))


def _in_force(config: Mapping[str, Any], old_map: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of both files, where the older one counts as in _tokens."""
    decided = config.get("added_tokens_decoder") is not None
    return config if decided else {**config, **old_map}


def _tokenizer_code(config: Mapping[str, Any]) -> str | None:
    """Return the first class that auto_map names for the tokenizer, such as module.Class."""
    named = config.get("auto_map")
    found = named.get("AutoTokenizer") if isinstance(named, dict) else None
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, str) else None


def _prefix_space(path: Path, config: Mapping[str, Any]) -> bool | None:
    """Return add_prefix_space where the class of the tokenizer looks at it."""
    name = config.get("tokenizer_class")
    if name is not None and not isinstance(name, str):
        raise TokenizerError(f"{path}: tokenizer_class is {name!r:.80}; expected a string")
    wanted = flag(path, config, "add_prefix_space")
    return wanted if (name or "").removesuffix("Fast") in PREFIX_SPACE_CLASSES else None


def _control_tokens(path: Path, fields: Mapping[str, Any]) -> frozenset[str]:
    names = fields.get("chat_control_tokens") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TokenizerError(f"{path}: chat_control_tokens is {names!r:.80}; expected names")
    return frozenset(names)
