"""Reads tokenizer_config.json: the tokens around a text."""

import json
from dataclasses import dataclass
from pathlib import Path

from jaxserve.tokenizer.protocol import TokenizerError

SETTINGS_FILE = "tokenizer_config.json"


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings of tokenizer_config.json.

    None means that the field is absent and the tokenizer's own file decides. legacy: in a
    SentencePiece model, text after a special token gets a dummy space too.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    legacy: bool | None = None


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the settings of a checkpoint folder; all None without a tokenizer_config.json.

    Raises:
        TokenizerError: The file is not JSON, or a field has another type than Hugging Face writes.
    """
    path = folder / SETTINGS_FILE
    if not path.exists():
        return TokenizerSettings()
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"{path}: not readable as JSON ({error}); copy the file again"
        ) from None
    if not isinstance(fields, dict):
        raise TokenizerError(
            f"{path}: holds {type(fields).__name__} where an object is expected; copy the file "
            f"again"
        )
    return TokenizerSettings(
        bos_token=_token(path, fields, "bos_token"),
        eos_token=_token(path, fields, "eos_token"),
        add_bos_token=_flag(path, fields, "add_bos_token"),
        add_eos_token=_flag(path, fields, "add_eos_token"),
        legacy=_flag(path, fields, "legacy"),
    )


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


def _token(path: Path, fields: dict, name: str) -> str | None:
    value = fields.get(name)
    content = value.get("content") if isinstance(value, dict) else value
    if isinstance(content, str) or value is None:
        return content
    raise TokenizerError(
        f'{path}: {name} is {value!r}; expected a string, {{"content": string}} or null'
    )


def _flag(path: Path, fields: dict, name: str) -> bool | None:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise TokenizerError(f"{path}: {name} is {value!r}; expected true, false or null")
