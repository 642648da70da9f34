"""The checkpoint of a draft model, beside that of the model which it drafts for."""

from collections.abc import Callable
from pathlib import Path

from jaxserve.config import EngineOptions
from jaxserve.errors import ConfigError
from jaxserve.loading.checkpoint import Model, load
from jaxserve.tokenizer import Tokenizer, load_tokenizer


def check_choice(options: EngineOptions, draft_model: str | Path | None) -> None:
    """ConfigError where there is a draft model that nobody asks for tokens, or the other way
    round."""
    if draft_model and options.speculate != "draft":
        raise ConfigError(f"--draft-model {draft_model}: drafts nothing (add --speculate draft)")
    if options.speculate == "draft" and not draft_model:
        raise ConfigError("--speculate draft: there is no draft model (--draft-model)")


def load_draft(folder: Path, model: Model, progress: Callable[[int, int, str], None]) -> Model:
    """Loaded onto the model's mesh, in its dtype; weights that are stored quantized stay so.

    ConfigError where its tokens are not the model's, or it generates none; else the errors of
    load().
    """
    check_tokens(folder, load_tokenizer(folder), model.tokenizer)
    draft = load(folder, model.mesh, str(model.params["embed"].dtype), progress)
    if draft.spec.embeds:
        raise ConfigError(f"--draft-model {folder}: it embeds, and generates nothing")
    return draft


def check_tokens(folder: Path, theirs: Tokenizer, ours: Tokenizer) -> None:
    """ConfigError naming the first token that is another one in the draft model; either may have
    more of them.
    """
    for token in range(min(theirs.vocab_size, ours.vocab_size)):
        there, here = _named(theirs, token), _named(ours, token)
        if there != here:
            raise ConfigError(
                f"--draft-model {folder}: token {token} is {there} there and {here} in the model "
                "(a draft model needs the model's tokens)"
            )


def _named(tokenizer: Tokenizer, token: int) -> str:
    """Its text, and whether it is none: special tokens are named."""
    text, (spelled, _) = tokenizer.token_text(token), tokenizer.token_bytes(token)
    return f"{text!r}" if spelled else f"the special {text!r}"
