"""The files that another program needs to tokenize, and to render chats, as this server does."""

import io
from contextlib import suppress
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from jaxserve.chat import Chat
from jaxserve.chat.source import TEMPLATE_FILE
from jaxserve.errors import ChatError, NotBuiltInError
from jaxserve.tokenizer import TokenizerError
from jaxserve.tokenizer.sentencepiece_json import tokenizer_json
from jaxserve.tokenizer.tokenizer_json import JSON_FILE

SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
)


def tokenizer_bundle(chat: Chat) -> bytes:
    """A ZIP archive, the same for the same files: tokenizer.json, settings, and the chat template
    that is used here.

    NotBuiltInError when the checkpoint has no tokenizer.json, and none can be made.
    """
    files = {JSON_FILE: _tokenizer(chat.folder)}
    files |= {name: path.read_bytes() for name in SETTINGS if (path := chat.folder / name).exists()}
    with suppress(ChatError):  # a model that does not chat has none
        files[TEMPLATE_FILE] = chat.template.source.encode()
    archive = io.BytesIO()
    with ZipFile(archive, "w", ZIP_DEFLATED) as bundle:
        for name, content in files.items():
            bundle.writestr(ZipInfo(name), content, ZIP_DEFLATED)
    return archive.getvalue()


def _tokenizer(folder: Path) -> bytes:
    if (folder / JSON_FILE).exists():
        return (folder / JSON_FILE).read_bytes()
    try:
        return tokenizer_json(folder).encode()
    except TokenizerError as error:
        problem = str(error).replace(f"{folder}/", "")  # where it lies is nobody's business
        raise NotBuiltInError(f"there is no {JSON_FILE} to hand out: {problem}") from None
