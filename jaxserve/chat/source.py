"""Sources of a checkpoint's chat templates, and the names of tokens that the templates use."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.chat.errors import NoTemplateError
from jaxserve.chat.renderer import MAX_TEMPLATE_BYTES
from jaxserve.errors import ChatError
from jaxserve.tokenizer import Tokenizer, TokenizerError
from jaxserve.tokenizer.companion_fields import read_object
from jaxserve.tokenizer.settings import SETTINGS_FILE, read_settings

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
ADDITIONAL = "additional_chat_templates"  # folder of further templates, by their names
FIELD = "chat_template"
DEFAULT = "default"
TOOL_USE = "tool_use"


@dataclass(frozen=True)
class ChatTemplate:
    """Source of a template, and its variables such as bos_token with the names of those tokens."""

    source: str
    tokens: dict[str, str | list[str]]  # a list for additional_special_tokens
    # Names of added tokens that the files call the template's own.
    control_tokens: frozenset[str] = frozenset()
    # Ids of tokens that a file declares but that do not count.
    ignored: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatTemplates:
    """Templates of a checkpoint."""

    default: ChatTemplate  # template of conversations without tools
    with_tools: ChatTemplate | None = None  # template of those with tools; None for the same
    notes: tuple[str, ...] = ()  # lines on templates that are not used

    @property
    def all(self) -> tuple[ChatTemplate, ...]:
        """The templates that are used."""
        return (self.default, self.with_tools) if self.with_tools else (self.default,)


def read_templates(folder: Path, tokenizer: Tokenizer, file: Path | None = None) -> ChatTemplates:
    """Return the template in `file`, or else the checkpoint folder's own.

    The folder's are chat_template.jinja with the files of additional_chat_templates, or else the
    field chat_template of chat_template.json or of tokenizer_config.json: a string, or a list of
    {name, template}. The one called "tool_use" is that of conversations with tools, as in
    transformers; that called "default" of all others. NoTemplateError is raised where there is
    none, ChatError where one cannot be read.
    """
    try:
        settings = read_settings(folder)
        beside = read_object(folder / TEMPLATE_JSON)
    except TokenizerError as error:
        raise ChatError(str(error), FIELD) from None
    tokens: dict[str, str | list[str]] = {
        **_default_tokens(tokenizer),
        **dict.fromkeys(settings.empty, ""),
        **settings.names,
    }
    if settings.additional:  # otherwise not defined, as in transformers 4
        tokens["additional_special_tokens"] = list(settings.additional)
    ignored = {token.name: token.id for token in settings.unused if token.id is not None}

    def made(source: str) -> ChatTemplate:
        return ChatTemplate(source, tokens, settings.control_tokens, ignored)

    if file:
        return ChatTemplates(made(_read_text(file)))
    sources = {
        TEMPLATE_FILE: _in_files(folder),
        TEMPLATE_JSON: beside.get(FIELD),
        SETTINGS_FILE: settings.chat_template,
    }
    named, notes = _chosen(folder, {name: field for name, field in sources.items() if field})
    with_tools = made(named[TOOL_USE]) if TOOL_USE in named else None
    return ChatTemplates(made(named[DEFAULT]), with_tools, notes)


def _chosen(folder: Path, sources: dict[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the templates of the first source by their names, and lines on what is not used."""
    if not sources:
        raise NoTemplateError(
            f"{folder} has no chat template; give one with --chat-template FILE", FIELD
        )
    first = next(iter(sources))
    named = _by_name(folder, sources.pop(first))
    notes = tuple(
        f"the chat template of {first} is used, and that of {other} is another one"
        for other, field in sources.items()
        if _differs(field, named)
    )
    unused = named.keys() - {DEFAULT, TOOL_USE}
    if first != TEMPLATE_FILE:
        unused |= {f"{ADDITIONAL}/{name}" for name in _additional(folder)}
    if unused:
        names = ", ".join(map(repr, sorted(unused)))
        notes += (f"the chat templates {names} are not used",)
    return named, notes


def _in_files(folder: Path) -> list[dict[str, str]]:
    """Return the templates that have files of their own, as a field lists them; none without.

    Files of other names than tool_use are not read.
    """
    if not os.path.lexists(folder / TEMPLATE_FILE):
        return []
    found = [{"name": DEFAULT, "template": _read_text(folder / TEMPLATE_FILE)}]
    for name in sorted(_additional(folder)):
        path = folder / ADDITIONAL / f"{name}.jinja"
        found.append({"name": name, "template": _read_text(path) if name == TOOL_USE else ""})
    return found


def _additional(folder: Path) -> set[str]:
    """Return the names of the templates that have files beside the default's."""
    place = folder / ADDITIONAL
    if not os.path.lexists(place):
        return set()
    try:
        names = os.listdir(place)
    except OSError as error:
        raise ChatError(f"{place}: {error.strerror}", FIELD) from None
    return {name.removesuffix(".jinja") for name in names if name.endswith(".jinja")} - {DEFAULT}


def _by_name(folder: Path, field: Any) -> dict[str, str]:
    """Return the templates of a field by their names; ChatError if it has no default."""
    if isinstance(field, str):
        return {DEFAULT: _bounded(field, folder)}
    named = dict[str, str]()
    for entry in field if isinstance(field, list) else [field]:
        match entry:
            case {"name": str(name), "template": str(template)} if name not in named:
                named[name] = _bounded(template, folder)
            case _:
                raise ChatError(
                    f"{folder} has the chat template {entry!r:.80}; it must be a string, or a list "
                    "of {name, template} with a name for each",
                    FIELD,
                )
    if DEFAULT not in named:
        raise NoTemplateError(
            f"{folder}: none of the chat templates {sorted(named)} is called '{DEFAULT}'; "
            "give one with --chat-template FILE",
            FIELD,
        )
    return named


def _differs(field: Any, named: Mapping[str, str]) -> bool:
    """Return whether a field has another template of a name than those that are used."""
    if not isinstance(field, list):
        return field != named[DEFAULT]
    listed = {
        entry.get("name"): entry.get("template") for entry in field if isinstance(entry, dict)
    }
    return any(named.get(str(name)) != template for name, template in listed.items())


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
