"""What tokenizer_config.json says about the tokens around a text."""

import json
from dataclasses import dataclass
from pathlib import Path

from jaxserve.tokenizer.protocol import TokenizerError

SETTINGS_FILE = "tokenizer_config.json"


@dataclass(frozen=True)
class TokenizerSettings:
    """None means that the file says nothing and the tokenizer's own file decides."""

    bos_token: str | None = None
    eos_token: str | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    legacy: bool | None = (
        None  # of SentencePiece: text after a special token has a dummy space, too
    )


def read_settings(folder: Path) -> TokenizerSettings:
    """Settings of a checkpoint folder; all None where it has no tokenizer_config.json.

    Raises:
        TokenizerError: the file is not JSON, or a field has another type than Hugging Face writes.
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
    """The ids to put at one end of a text: default where the settings say nothing.

    Raises:
        TokenizerError: the flag called name asks for a token that the tokenizer does not have.
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
