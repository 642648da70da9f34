"""The tokenizer of a checkpoint folder."""

from pathlib import Path

from jaxserve.tokenizer import sentencepiece_model, tokenizer_json
from jaxserve.tokenizer.protocol import Tokenizer, TokenizerError
from jaxserve.tokenizer.settings import read_settings


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads tokenizer.json or, where there is none, tokenizer.model; tokenizer_config.json is
    optional.

    add_bos_token and add_eos_token are honoured where the configuration has them. Where it is
    silent, a tokenizer.json adds what its post-processor says, and a SentencePiece model adds BOS
    if it has one.

    Raises:
        TokenizerError: the folder has neither file, or a file is corrupt or asks for what is not
        supported.
    """
    settings = read_settings(folder)
    json_file, model_file = (
        folder / tokenizer_json.JSON_FILE,
        folder / sentencepiece_model.MODEL_FILE,
    )
    if json_file.exists():
        return tokenizer_json.load_tokenizer_json(json_file, settings)
    if model_file.exists():
        return sentencepiece_model.load_sentencepiece(model_file, settings)
    raise TokenizerError(
        f"{folder}: has neither {json_file.name} nor {model_file.name}; copy one of them from "
        f"the checkpoint's source"
    )
