"""Tokens that a tokenizer's files have, but its model does not.

A model has the ids from 0 to the size of its vocabulary. Published tokenizers have more: those of
Gemma 3's text models have a token for images, and derivatives of Llama 2 a [PAD] after the last id.
Such tokens are left out of the tokenizer, so that nothing can ask for their ids.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tokenizers

from jaxserve.tokenizer.protocol import TokenizerError
from jaxserve.tokenizer.special import NO_WORD, any_of


@dataclass(frozen=True)
class MissingTokens:
    """Tokens that the model does not have: their ids by name, and the number of the model's ids."""

    ids: Mapping[str, int] = field(default_factory=dict)
    model_ids: int = 0

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """Pattern of names that are more than words or white space, which may stand in any text."""
        names = (name for name in self.ids if len(name) > 1 and NO_WORD.search(name))
        return re.compile(any_of(names))

    def of_model(self, token_id: int | None) -> int | None:
        """Return an id, or None for one that the model does not have."""
        return None if token_id in self.ids.values() else token_id

    def require_unwritten(self, text: str) -> None:
        """Raise TokenizerError for a conversation whose chat template wrote one of the names."""
        if found := self._marks.search(text):
            name = found[0]
            raise TokenizerError(
                f"the chat template writes {name!r}, which is token {self.ids[name]}, but the "
                f"model's ids are 0 to {self.model_ids - 1}; give another template with "
                f"--chat-template"
            )

    def require_absent(self, ids: Iterable[int], setting: str) -> None:
        """Raise TokenizerError if one of the tokens is added to every text, as `setting` says."""
        for name, token_id in self.ids.items():
            if token_id in ids:
                raise TokenizerError(
                    f"{name!r} (token {token_id}) would be added to every text, but the model's "
                    f"ids are 0 to {self.model_ids - 1}; set {setting} to false in "
                    f"tokenizer_config.json, or copy the files again from one checkpoint"
                )


def split_at(
    model_ids: int | None, ids: Mapping[str, int], added: Iterable[str], source: object
) -> MissingTokens:
    """Return the tokens that a model with so many ids does not have; None is no model.

    ids: of all tokens by name. added: names of those that are found by name.

    Raises:
        TokenizerError: One of the others is missing, with which text would be spelled.
    """
    if model_ids is None:
        return MissingTokens()
    missing = {name: token_id for name, token_id in ids.items() if token_id >= model_ids}
    for name in missing.keys() - set(added):
        raise TokenizerError(
            f"{source}: its token {name!r} has the id {missing[name]}, the model's vocabulary the "
            f"ids 0 to {model_ids - 1} (the files are not of one checkpoint)"
        )
    return MissingTokens(missing, model_ids)


def without(library: tokenizers.Tokenizer, missing: MissingTokens) -> tokenizers.Tokenizer:
    """Return a tokenizer that does not have the missing tokens.

    Raises:
        TokenizerError: Other tokens are made of them, or one of them stands for unknown text.
    """
    if not missing.ids:
        return library
    fields = json.loads(library.to_str())
    fields["added_tokens"] = [t for t in fields["added_tokens"] if t["content"] not in missing.ids]
    model = fields["model"]
    try:
        if model.get("unk_token") in missing.ids:
            raise ValueError(f"{model['unk_token']!r} stands for unknown text")
        _shorten(model, missing)
        return tokenizers.Tokenizer.from_str(json.dumps(fields))
    except Exception as error:  # the library raises plain Exception for everything
        names = ", ".join(map(repr, missing.ids))
        raise TokenizerError(
            f"the model's ids are 0 to {missing.model_ids - 1}, but the tokenizer cannot do "
            f"without {names} beyond them: {error} (the files are not of one checkpoint)"
        ) from None


def _shorten(model: dict[str, Any], missing: MissingTokens) -> None:
    """Remove the missing tokens from the vocabulary of a model of the tokenizers library."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: a token's id is its place
        model["vocab"] = vocabulary[: missing.model_ids]
    else:
        model["vocab"] = {name: i for name, i in vocabulary.items() if name not in missing.ids}
