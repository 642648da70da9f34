"""Loads the tokenizer of a checkpoint folder."""

from pathlib import Path

from jaxserve.tokenizer import sentencepiece_model, tokenizer_json
from jaxserve.tokenizer.protocol import Tokenizer, TokenizerError
from jaxserve.tokenizer.settings import read_settings


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load tokenizer.json or, in its absence, tokenizer.model.

    The flags add_bos_token and add_eos_token of tokenizer_config.json are honoured where they are
    set. Otherwise a tokenizer.json adds the tokens of its post-processor, and a SentencePiece model
    adds BOS if it has one.

    Raises:
        TokenizerError: The folder has neither file, or a file is corrupt or not supported.
    """
    settings = read_settings(folder)
    json_file = folder / tokenizer_json.JSON_FILE
    model_file = folder / sentencepiece_model.MODEL_FILE
    if json_file.exists():
        return tokenizer_json.load_tokenizer_json(json_file, settings)
    if model_file.exists():
        return sentencepiece_model.load_sentencepiece(model_file, settings)
    raise TokenizerError(
        f"{folder} has neither {json_file.name} nor {model_file.name}; copy one of them from "
        f"the checkpoint's source"
    )
