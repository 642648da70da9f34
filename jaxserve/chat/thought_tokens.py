"""Budgets of thoughts in a tokenizer's tokens."""

from jaxserve.chat.answers import harmony
from jaxserve.chat.answers.thinking import CLOSE, OPEN
from jaxserve.errors import ChatError
from jaxserve.request import MAX_CLOSING, MAX_OPENING, ThoughtBudget
from jaxserve.tokenizer import Tokenizer

FIELD = "thinking_budget"
CLOSING = f"\n{CLOSE}\n\n"  # as models write it that were trained on whole lines


def budget_of(tokens: int, begun: bool, tokenizer: Tokenizer) -> ThoughtBudget:
    """Return the budget of an answer's thought.

    Args:
        tokens: Tokens of the thought behind which it is closed.
        begun: Whether the prompt has begun the thought.

    Raises:
        ChatError: The marks of thoughts are no tokens of the tokenizer.
    """
    end = _token(CLOSE, tokenizer)
    closing = tuple(tokenizer.encode_special(CLOSING))
    if end not in closing or len(closing) > MAX_CLOSING:
        closing = (end,)
    if begun:
        return ThoughtBudget(tokens, end, closing)
    # GLM-4.5 begins a line before its thought.
    gaps = tokenizer.encode_inner("\n")
    gap = gaps[0] if len(gaps) == 1 else None
    return ThoughtBudget(tokens, end, closing, (_token(OPEN, tokenizer),), gap)


def budget_in_channels(tokens: int, calls: bool, tokenizer: Tokenizer) -> ThoughtBudget:
    """Return the budget of the first message of an answer in Harmony, if it is a thought.

    Args:
        tokens: Tokens of the thought behind which it is closed.
        calls: Whether the answer may call functions: then another message is begun, in a channel
            that the model chooses, and otherwise the answer proper.

    Raises:
        ChatError: The marks of messages are no tokens of the tokenizer.
    """
    end = _token(harmony.END, tokenizer)
    closing = f"{harmony.END}{harmony.START}{harmony.ROLE}"
    if not calls:
        closing += f"{harmony.CHANNEL}{harmony.FINAL}{harmony.MESSAGE}"
    opening = f"{harmony.CHANNEL}{harmony.ANALYSIS}{harmony.MESSAGE}"
    closing_ids = tuple(tokenizer.encode_special(closing))
    opening_ids = tuple(tokenizer.encode_special(opening))
    if len(closing_ids) > MAX_CLOSING or len(opening_ids) > MAX_OPENING:
        problem = f"needs a tokenizer that writes {opening} in {MAX_OPENING} tokens (leave it out)"
        raise ChatError(problem, FIELD)
    return ThoughtBudget(tokens, end, closing_ids, opening_ids)


def _token(mark: str, tokenizer: Tokenizer) -> int:
    names = {**tokenizer.added_tokens, **tokenizer.special_tokens}
    if mark not in names:
        problem = (
            f"needs a tokenizer in which {mark} is one token; this one has none (leave it out)"
        )
        raise ChatError(problem, FIELD)
    return names[mark]
