"""The files with which another program tokenizes and renders chats as this server does."""

import io
import os
from contextlib import suppress
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from jaxserve.chat import Chat
from jaxserve.chat.source import ADDITIONAL, TEMPLATE_FILE, TOOL_USE
from jaxserve.errors import ChatError, NotBuiltInError
from jaxserve.tokenizer import TokenizerError
from jaxserve.tokenizer.beside_json import JSON_FILE
from jaxserve.tokenizer.loading import read_tokenizer_json
from jaxserve.tokenizer.sentencepiece_json import tokenizer_json
from jaxserve.tokenizer.tokenizer_json import complete_json

SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
)


def tokenizer_bundle(chat: Chat, model_ids: int | None = None) -> bytes:
    """Return a ZIP archive with tokenizer.json, settings, and the chat templates in use.

    tokenizer.json has no added tokens that the model does not have, for which see load_tokenizer's
    model_ids; the settings are the folder's own. The same files give the same bytes.

    Raises:
        NotBuiltInError: The checkpoint has no tokenizer.json, and none can be made from its
            tokenizer.
    """
    files = {JSON_FILE: _tokenizer(chat.folder, model_ids)}
    for name in SETTINGS:
        path = chat.folder / name
        if os.path.lexists(path):
            files[name] = path.read_bytes()
    with suppress(ChatError):  # a model that does not chat has no template
        files[TEMPLATE_FILE] = chat.template.source.encode()
        if chat.templates.with_tools:
            files[f"{ADDITIONAL}/{TOOL_USE}.jinja"] = chat.templates.with_tools.source.encode()
    archive = io.BytesIO()
    with ZipFile(archive, "w", ZIP_DEFLATED) as bundle:
        for name, content in files.items():
            bundle.writestr(ZipInfo(name), content, ZIP_DEFLATED)  # ZipInfo has a fixed date
    return archive.getvalue()


def _tokenizer(folder: Path, model_ids: int | None) -> bytes:
    try:
        file = read_tokenizer_json(folder)
        if file:
            return complete_json(file, model_ids).encode()
        return tokenizer_json(folder, model_ids).encode()
    except TokenizerError as error:
        problem = str(error).replace(f"{folder}/", "")  # clients must not see the server's paths
        raise NotBuiltInError(f"this model has no {JSON_FILE} to hand out: {problem}") from None
