"""Source of a checkpoint's chat template, and the names of tokens that the template uses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.chat.errors import NoTemplateError
from jaxserve.chat.renderer import MAX_TEMPLATE_BYTES
from jaxserve.errors import ChatError
from jaxserve.tokenizer import Tokenizer, TokenizerError
from jaxserve.tokenizer.companion_fields import read_object
from jaxserve.tokenizer.settings import read_settings

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
FIELD = "chat_template"


@dataclass(frozen=True)
class ChatTemplate:
    """Source of a template, and its variables such as bos_token with the names of those tokens.

    control_tokens: names of added tokens that the files call the template's own. ignored: ids of
    tokens that a file declares but that do not count.
    """

    source: str
    tokens: dict[str, str]
    control_tokens: frozenset[str] = frozenset()
    ignored: Mapping[str, int] = field(default_factory=dict)


def read_template(folder: Path, tokenizer: Tokenizer, file: Path | None = None) -> ChatTemplate:
    """Return the template in `file`, or else the checkpoint folder's own.

    The folder's is chat_template.jinja, or else the field chat_template of chat_template.json or of
    tokenizer_config.json: a string, or a list of {name, template}, of which the one called
    "default" is taken. NoTemplateError is raised where there is none, ChatError where it cannot be
    read.
    """
    try:
        settings = read_settings(folder)
        beside = read_object(folder / TEMPLATE_JSON)
    except TokenizerError as error:
        raise ChatError(str(error), FIELD) from None
    source = _source(folder, beside.get(FIELD) or settings.chat_template, file)
    tokens = _default_tokens(tokenizer) | dict(settings.names)
    ignored = {token.name: token.id for token in settings.unused if token.id is not None}
    return ChatTemplate(source, tokens, settings.control_tokens, ignored)


def _source(folder: Path, template: Any, file: Path | None) -> str:
    """Return the source of the template: that of a file, or else the folder's field."""
    if file or (folder / TEMPLATE_FILE).exists():
        return _read_text(file or folder / TEMPLATE_FILE)
    if not template:
        raise NoTemplateError(
            f"{folder} has no chat template; give one with --chat-template FILE", FIELD
        )
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


def _default_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the names of the tokenizer's own begin and end tokens, for folders that name none."""
    ids = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    return {
        name: tokenizer.token_text(token_id)
        for name, token_id in ids.items()
        if token_id is not None
    }
