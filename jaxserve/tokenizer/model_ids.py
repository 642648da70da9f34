"""Tokens that a tokenizer's files have, but its model does not.

A model has the ids from 0 to the size of its vocabulary. Published tokenizers have more: those of
Gemma 3's text models have a token for images, and derivatives of Llama 2 a [PAD] after the last id.
Such tokens are hidden by the tokenizer, so that nothing can ask for their ids.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

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

    @cached_property
    def names(self) -> dict[int, str]:
        """Names of the tokens by id."""
        return {token_id: name for name, token_id in self.ids.items()}

    def of_model(self, token_id: int | None) -> int | None:
        """Return an id, or None for one that the model does not have."""
        return None if token_id in self.names else token_id

    def require_unwritten(self, text: str) -> None:
        """Raise TokenizerError for a prompt in which a chat template wrote one of the names."""
        if found := self._marks.search(text):
            name = found[0]
            raise TokenizerError(
                f"the chat template's prompt has {name!r}, which is token {self.ids[name]}, but "
                f"the model's ids are 0 to {self.model_ids - 1}; leave it out of the messages, or "
                f"give another template with --chat-template"
            )

    def require_absent(self, ids: Iterable[int], setting: str) -> None:
        """Raise TokenizerError if one of the tokens is added to every text, as `setting` says."""
        for token_id in ids:
            if token_id in self.names:
                raise TokenizerError(
                    f"{self.names[token_id]!r} (token {token_id}) would be added to every text, "
                    f"but the model's ids are 0 to {self.model_ids - 1}; correct {setting} in "
                    f"tokenizer_config.json, or copy the files again from one checkpoint"
                )

    def needed(self, name: str, source: object) -> TokenizerError:
        """Return the error for a token without which some texts cannot be spelled."""
        return TokenizerError(
            f"{source}: its token {name!r} has the id {self.ids[name]}, the model's vocabulary the "
            f"ids 0 to {self.model_ids - 1}, and not every text can be spelled without it (the "
            f"files are not of one checkpoint)"
        )


def split_at(
    model_ids: int | None, ids: Mapping[str, int], added: Iterable[str], source: object
) -> MissingTokens:
    """Return the tokens that a model with `model_ids` ids does not have; None is no model.

    Args:
        ids: Ids of all tokens by name.
        added: Names of the tokens that are found by name.

    Raises:
        TokenizerError: A token outside of `added` is missing, with which text would be spelled.
    """
    if model_ids is None:
        return MissingTokens()
    beyond = {name: token_id for name, token_id in ids.items() if token_id >= model_ids}
    missing = MissingTokens(beyond, model_ids)
    spelling = beyond.keys() - set(added)
    if spelling:
        raise missing.needed(min(spelling, key=lambda name: beyond[name]), source)
    return missing
