"""Reads tekken.json, the tokenizer file of Mistral's models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jaxserve.tokenizer.byte_pairs import BytePairs, decoded
from jaxserve.tokenizer.companion_fields import read_object
from jaxserve.tokenizer.protocol import TokenizerError

TEKKEN_FILE: Final = "tekken.json"
# Special tokens of files that do not list them (versions up to v7), from id 0 on.
UNLISTED: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
BOS: Final = "<s>"
EOS: Final = "</s>"
MAX_SPECIAL: Final = 2**16
# Versions of the format; those behind UNLISTED_UP_TO list their special tokens.
VERSIONS: Final = ("v2", "v3", "v7", "v11", "v13", "v15")
UNLISTED_UP_TO: Final = "v7"
# Fields that are read, and those for other input than text and for Mistral's own programs.
FIELDS: Final = frozenset(
    """
    config vocab special_tokens version type image multimodal audio model_settings_builder
    """.split()
)
CONFIG_FIELDS: Final = frozenset(
    """
    pattern num_vocab_tokens default_vocab_size default_num_special_tokens version
    """.split()
)


def read_tekken(path: Path) -> BytePairs:
    """Read the vocabulary as far as the model has it, behind its special tokens.

    Special tokens without a name are called <SPECIAL_n>, as Mistral's own library calls them.

    Raises:
        TokenizerError: A field is missing or wrong.
    """
    fields = read_object(path)
    config = _config(path, fields)
    _check_known(path, fields, FIELDS)
    _check_known(path, config, CONFIG_FIELDS)
    if config.get("version") not in VERSIONS:
        raise TokenizerError(
            f"{path}: version {config.get('version')!r:.40} is not known (known: "
            f"{', '.join(VERSIONS)})"
        )
    size = _count(path, config, "default_vocab_size")
    reserved = _count(path, config, "default_num_special_tokens")
    vocab = fields.get("vocab")
    if not 0 < reserved <= min(size, MAX_SPECIAL) or not isinstance(vocab, list):
        raise TokenizerError(
            f"{path}: {reserved} special tokens of {size}, and a vocab that is "
            f"{type(vocab).__name__}; copy the file again"
        )
    if len(vocab) < size - reserved:
        raise TokenizerError(
            f"{path}: vocab has {len(vocab)} tokens; config asks for {size - reserved}"
        )
    tokens = [_token(path, rank, entry) for rank, entry in enumerate(vocab[: size - reserved])]
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise TokenizerError(f"{path}: pattern is {pattern!r:.40}; expected a string")
    special = _special(path, fields, config["version"], reserved)
    bos = BOS if BOS in special else None
    return BytePairs(path.name, tokens, pattern, special, reserved, bos)


def _config(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    config = fields.get("config")
    if not isinstance(config, dict):
        raise TokenizerError(f"{path}: config is no object; copy the file again")
    return config


def _check_known(path: Path, fields: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise TokenizerError(
            f"{path}: the field {unknown[0]!r:.40} is not understood, and could change the tokens"
        )


def _count(path: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int:
        raise TokenizerError(f"{path}: {name} is {value!r:.40}; expected an integer")
    return value


def _token(path: Path, rank: int, entry: Any) -> bytes:
    """Return the bytes of an entry of vocab, which has its rank."""
    token = entry.get("token_bytes") if isinstance(entry, dict) else None
    if not isinstance(token, str) or entry.get("rank") != rank:
        raise TokenizerError(
            f"{path}: the entry {rank} of vocab is {entry!r:.80}; expected its rank and token_bytes"
        )
    return decoded(path.name, token)


def _special(path: Path, fields: Mapping[str, Any], version: str, reserved: int) -> dict[str, int]:
    """Return the ids of special tokens by their names."""
    listed = fields.get("special_tokens")
    names = list(UNLISTED)
    if listed is not None:
        names = [_special_name(path, rank, entry) for rank, entry in enumerate(_entries(listed))]
    elif VERSIONS.index(version) > VERSIONS.index(UNLISTED_UP_TO):
        raise TokenizerError(f"{path}: special_tokens are missing; copy the file again")
    if len(names) > reserved:
        raise TokenizerError(f"{path}: {len(names)} special tokens, for {reserved} ids")
    names += (f"<SPECIAL_{rank}>" for rank in range(len(names), reserved))
    special = {name: rank for rank, name in enumerate(names)}
    if len(special) < reserved:
        raise TokenizerError(f"{path}: two special tokens have one name; copy the file again")
    return special


def _entries(listed: Any) -> list[Any]:
    return listed if isinstance(listed, list) else [listed]


def _special_name(path: Path, rank: int, entry: Any) -> str:
    """Return the name of an entry of special_tokens, which has its rank."""
    name = entry.get("token_str") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name or entry.get("rank") != rank:
        raise TokenizerError(
            f"{path}: the entry {rank} of special_tokens is {entry!r:.80}; expected its rank and "
            "token_str"
        )
    return name
