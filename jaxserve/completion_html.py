"""A completion as HTML, which notebooks show instead of its repr."""

import math
from collections.abc import Sequence
from html import escape

from jaxserve.engine.events import Logprob
from jaxserve.tokenizer import Tokenizer

PROMPT_CHARACTERS = 400  # of a prompt's end, before the text
DOUBT = "217, 130, 43"  # red, green and blue of an improbable token; that of the server's page


def completion_html(
    prompt: str, text: str, logprobs: Sequence[Logprob] | None, tokenizer: Tokenizer | None
) -> str:
    """Return the end of the prompt, dimmed, and the text behind it.

    With log-probabilities and a tokenizer every token has a background, the stronger the less
    probable it was, and a tooltip with its probability and the alternatives.
    """
    shown = prompt[-PROMPT_CHARACTERS:]
    cut = "…" if len(shown) < len(prompt) else ""
    if logprobs is None or tokenizer is None:
        body = escape(text)
    else:
        body = "".join(_token(entry, tokenizer) for entry in logprobs)
    return (
        '<div style="white-space: pre-wrap">'
        f'<span style="opacity: 0.6">{cut}{escape(shown)}</span>{body}</div>'
    )


def _token(entry: Logprob, tokenizer: Tokenizer) -> str:
    probability = math.exp(entry.logprob)
    named = [(entry.token, entry.logprob), *entry.top]
    lines = [f"{tokenizer.token_text(token)!r} {math.exp(x):.1%}" for token, x in named]
    return (
        f'<span style="background: rgba({DOUBT}, {1 - probability:.2f})" '
        f'title="{escape(chr(10).join(lines))}">{escape(tokenizer.token_text(entry.token))}</span>'
    )
