"""Reads tokenizer.json, the file of the Hugging Face tokenizers library."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from jaxserve.tokenizer.beside_json import JSON_FILE, apply_settings
from jaxserve.tokenizer.library_tokenizer import JsonTokenizer, added_names
from jaxserve.tokenizer.model_ids import split_at
from jaxserve.tokenizer.protocol import TokenizerError
from jaxserve.tokenizer.settings import TokenizerSettings


@dataclass(frozen=True)
class TokenizerJson:
    """The text of a tokenizer.json, or of another file written in its form."""

    source: Path  # the file, for errors
    text: str
    settings: TokenizerSettings  # what the files beside it say


def load_tokenizer_json(file: TokenizerJson, model_ids: int | None = None) -> JsonTokenizer:
    """Load a tokenizer.json; `model_ids` is as in `load_tokenizer`.

    Raises:
        TokenizerError: The file is no tokenizer.json, or JsonTokenizer refuses it.
    """
    with _errors_name(file):
        library = _library_of(file)
        return JsonTokenizer(library, json.loads(file.text), file.settings, model_ids)


def complete_json(file: TokenizerJson, model_ids: int | None = None) -> str:
    """Return a tokenizer.json that has every token of the files beside it.

    It is the file as it is where they declare nothing more. Added tokens that the model does not
    have are left out; `model_ids` is as in `load_tokenizer`.

    Raises:
        TokenizerError: As load_tokenizer_json.
    """
    with _errors_name(file):
        library = _library_of(file)
        before = _added_tokens(library)
        apply_settings(library, json.loads(file.text), file.settings)
        missing = split_at(model_ids, library.get_vocab(), added_names(library), JSON_FILE)
    if missing.ids:
        fields = json.loads(library.to_str())
        added = fields["added_tokens"]
        fields["added_tokens"] = [token for token in added if token["content"] not in missing.ids]
        return json.dumps(fields, ensure_ascii=False)
    return file.text if _added_tokens(library) == before else library.to_str()


@contextmanager
def _errors_name(file: TokenizerJson) -> Iterator[None]:
    """Let errors about tokenizer.json name the file that was written in its form."""
    try:
        yield
    except TokenizerError as error:
        raise TokenizerError(str(error).replace(JSON_FILE, file.source.name)) from error


def _added_tokens(library: tokenizers.Tokenizer) -> dict[int, str]:
    """Return the added tokens with all their properties, for comparison."""
    return {id: repr(token) for id, token in library.get_added_tokens_decoder().items()}


def _library_of(file: TokenizerJson) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(file.text)
    except Exception as error:  # the library raises plain Exception for everything
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{file.source}: not a tokenizer.json ({reason}); copy the file again"
        ) from None
