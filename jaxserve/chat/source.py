"""Source of a checkpoint's chat template, and the names of tokens that the template uses."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.chat.renderer import MAX_TEMPLATE_BYTES
from jaxserve.errors import ChatError
from jaxserve.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins
FIELD = "chat_template"


@dataclass(frozen=True)
class ChatTemplate:
    """Source of a template, and its variables such as bos_token with the names of those tokens."""

    source: str
    tokens: dict[str, str]


def read_template(folder: Path, tokenizer: Tokenizer, file: Path | None = None) -> ChatTemplate:
    """Return the template in `file`, or else the checkpoint folder's own.

    The folder's is chat_template.jinja, or else the field chat_template of chat_template.json or of
    tokenizer_config.json: a string, or a list of {name, template}, of which the one called
    "default" is taken. ChatError is raised where there is none, or it cannot be read.
    """
    settings: dict[str, Any] = {}
    for name in SETTINGS_FILES:
        settings |= _read_object(folder / name)
    return ChatTemplate(
        _source(folder, settings, file), _default_tokens(tokenizer) | _named_tokens(settings)
    )


def _source(folder: Path, settings: dict[str, Any], file: Path | None) -> str:
    """Return the source of the template, wherever it is."""
    if file or (folder / TEMPLATE_FILE).exists():
        return _read_text(file or folder / TEMPLATE_FILE)
    template = _read_object(folder / TEMPLATE_JSON).get(FIELD) or settings.get(FIELD)
    if not template:
        raise ChatError(f"{folder} has no chat template; give one with --chat-template FILE", FIELD)
    if isinstance(template, list):
        template = _default_of(template, folder)
    if not isinstance(template, str):
        raise ChatError(
            f"{folder} has the chat template {template!r:.80}; "
            "it must be a string, or a list of {name, template}",
            FIELD,
        )
    return _bounded(template, folder)


def _default_of(templates: list[Any], folder: Path) -> Any:
    """Return the template called "default" in a list of {name, template}."""
    named = {
        entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)
    }
    if "default" not in named:
        raise ChatError(
            f"{folder}: none of the chat templates {sorted(map(str, named))} is called 'default'; "
            "give one with --chat-template FILE",
            FIELD,
        )
    return named["default"]


def _bounded(template: str, where: Path) -> str:
    """Return a template of at most MAX_TEMPLATE_BYTES; raise ChatError for a larger one."""
    size = len(template.encode("utf-8", "replace"))
    if size > MAX_TEMPLATE_BYTES:
        raise ChatError(f"{where} has {size} bytes; the limit is {MAX_TEMPLATE_BYTES}", FIELD)
    return template


def _read_text(path: Path) -> str:
    """Return the template in a file."""
    try:
        with path.open("rb") as file:
            return _bounded(file.read(MAX_TEMPLATE_BYTES + 1).decode("utf-8"), path)
    except OSError as error:
        raise ChatError(f"{path}: {error.strerror}", FIELD) from None
    except UnicodeDecodeError as error:
        raise ChatError(
            f"{path} is not UTF-8 text (byte {error.start}: {error.reason})", FIELD
        ) from None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is no file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ChatError(
            f"{path} is not readable as JSON ({error}); copy the file again", FIELD
        ) from None
    if not isinstance(content, dict):
        raise ChatError(f"{path} holds {type(content).__name__} where an object is expected", FIELD)
    return content


def _default_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the names of the tokenizer's own begin and end tokens, for folders that name none."""
    ids = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    return {
        name: tokenizer.token_text(token_id)
        for name, token_id in ids.items()
        if token_id is not None
    }


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return every field that names a token: bos_token, eos_token, pad_token and so on.

    A field's value is a string, or an object with the string as its "content".
    """
    names = {}
    for field, value in settings.items():
        name = value.get("content") if isinstance(value, dict) else value
        if field.endswith("_token") and isinstance(name, str):
            names[field] = name
    return names
