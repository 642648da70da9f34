"""Checkpoint of a draft model, which must have the tokens of the model that it drafts for."""

from pathlib import Path

from jaxserve.flag_errors import flag_error
from jaxserve.loading.folder import ModelFiles, open_model
from jaxserve.tokenizer import Tokenizer


def open_draft(folder: Path, model: ModelFiles) -> ModelFiles:
    """Open the draft model of a model.

    ConfigError when the draft model's tokens differ from the model's or it embeds instead of
    generating; otherwise the errors of `open_model`.
    """
    draft = open_model(folder)
    check_tokens(folder, draft.tokens.tokenizer, model.tokens.tokenizer)
    if draft.spec.embeds:
        raise flag_error("--draft-model", folder, "this model embeds and generates no tokens")
    return draft


def check_tokens(folder: Path, draft: Tokenizer, model: Tokenizer) -> None:
    """Raise ConfigError naming the first token id that the two tokenizers decode differently.

    Only ids that both have are compared; either tokenizer may have more, and gaps.
    """
    for token in range(min(draft.vocab_size, model.vocab_size)):
        in_draft = _describe(draft, token)
        in_model = _describe(model, token)
        if in_draft and in_model and in_draft != in_model:
            problem = (
                f"its token {token} is {in_draft}, and {in_model} in the model (a draft model "
                f"needs the model's tokens)"
            )
            raise flag_error("--draft-model", folder, problem)


def _describe(tokenizer: Tokenizer, token: int) -> str | None:
    """Return a token's text for comparison and errors, or None where the tokenizer has a gap.

    Special tokens are marked as such.
    """
    text = tokenizer.token_text(token)
    has_bytes, _ = tokenizer.token_bytes(token)
    if has_bytes:
        return f"{text!r}"
    return f"the special {text!r}" if tokenizer.token_id(text) == token else None
