"""Loads the tokenizer of a checkpoint folder."""

import os
from dataclasses import replace
from pathlib import Path

from jaxserve.tokenizer.beside_json import JSON_FILE
from jaxserve.tokenizer.beside_model import MODEL_FILE
from jaxserve.tokenizer.byte_pairs import tokenizer_json
from jaxserve.tokenizer.protocol import Tokenizer, TokenizerError
from jaxserve.tokenizer.sentencepiece_model import load_sentencepiece
from jaxserve.tokenizer.settings import TokenizerSettings, read_settings
from jaxserve.tokenizer.tekken import BOS, EOS, TEKKEN_FILE, read_tekken
from jaxserve.tokenizer.tiktoken_file import TIKTOKEN_FILE, read_tiktoken
from jaxserve.tokenizer.tokenizer_json import TokenizerJson, load_tokenizer_json

# Files that hold a tokenizer; the first that is there counts.
FILES = (JSON_FILE, TEKKEN_FILE, TIKTOKEN_FILE, MODEL_FILE)


def load_tokenizer(folder: Path, model_ids: int | None = None) -> Tokenizer:
    """Load tokenizer.json or, in its absence, tekken.json, tiktoken.model or tokenizer.model.

    The flags add_bos_token and add_eos_token of tokenizer_config.json are honoured where they are
    set. Otherwise a tokenizer.json adds the tokens of its post-processor, tekken.json and a
    SentencePiece model add BOS if they have one, and tiktoken.model adds nothing.

    Args:
        folder: The checkpoint folder.
        model_ids: Number of the model's ids, which are those from 0 on. Added tokens beyond them
            are missing in the tokenizer: their names are text. None keeps all tokens.

    Raises:
        TokenizerError: The folder has none of the files, a file is corrupt or not supported, or
            text cannot be spelled with the model's ids.
    """
    file = read_tokenizer_json(folder)
    if file:
        return load_tokenizer_json(file, model_ids)
    model_file = folder / MODEL_FILE
    if os.path.lexists(model_file):
        return load_sentencepiece(model_file, read_settings(folder), model_ids)
    raise TokenizerError(
        f"{folder} has none of {', '.join(FILES)}; copy one of them from the checkpoint's source"
    )


def read_tokenizer_json(folder: Path) -> TokenizerJson | None:
    """Return the folder's tokenizer.json, or its tekken.json or tiktoken.model in that form.

    None where the folder has none of them. TokenizerError for a file that cannot be read.
    """
    settings = read_settings(folder)
    for name in FILES[:-1]:
        path = folder / name
        if os.path.lexists(path):
            return _as_json(path, settings)
    return None


def _as_json(path: Path, settings: TokenizerSettings) -> TokenizerJson:
    if path.name == TEKKEN_FILE:
        pairs = read_tekken(path)
        ends = {"bos_token": BOS, "eos_token": EOS}
        own = {field: name for field, name in ends.items() if name in pairs.special}
        named = replace(settings, names=own | dict(settings.names))
        return TokenizerJson(path, tokenizer_json(pairs), named)
    if path.name == TIKTOKEN_FILE:
        return TokenizerJson(path, tokenizer_json(read_tiktoken(path, settings)), settings)
    try:
        return TokenizerJson(path, path.read_text(encoding="utf-8"), settings)
    except (OSError, UnicodeDecodeError) as error:
        problem = f"not a tokenizer.json ({error}); copy the file again"
        raise TokenizerError(f"{path}: {problem}") from None
