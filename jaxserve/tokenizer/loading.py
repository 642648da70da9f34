"""Loads the tokenizer of a checkpoint folder."""

import os
from pathlib import Path

from jaxserve.tokenizer.beside_json import JSON_FILE
from jaxserve.tokenizer.beside_model import MODEL_FILE
from jaxserve.tokenizer.protocol import Tokenizer, TokenizerError
from jaxserve.tokenizer.sentencepiece_model import load_sentencepiece
from jaxserve.tokenizer.settings import read_settings
from jaxserve.tokenizer.tokenizer_json import load_tokenizer_json


def load_tokenizer(folder: Path, model_ids: int | None = None) -> Tokenizer:
    """Load tokenizer.json or, in its absence, tokenizer.model.

    The flags add_bos_token and add_eos_token of tokenizer_config.json are honoured where they are
    set. Otherwise a tokenizer.json adds the tokens of its post-processor, and a SentencePiece model
    adds BOS if it has one.

    Args:
        folder: The checkpoint folder.
        model_ids: Number of the model's ids, which are those from 0 on. Added tokens beyond them
            are missing in the tokenizer: their names are text. None keeps all tokens.

    Raises:
        TokenizerError: The folder has neither file, a file is corrupt or not supported, or text
            cannot be spelled with the model's ids.
    """
    settings = read_settings(folder)
    json_file = folder / JSON_FILE
    model_file = folder / MODEL_FILE
    if os.path.lexists(json_file):
        return load_tokenizer_json(json_file, settings, model_ids)
    if os.path.lexists(model_file):
        return load_sentencepiece(model_file, settings, model_ids)
    raise TokenizerError(
        f"{folder} has neither {json_file.name} nor {model_file.name}; copy one of them from "
        f"the checkpoint's source"
    )
