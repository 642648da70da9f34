"""Output of the programs: completions as text or JSON, and the last line."""

import io
import json
import statistics
import sys

from jaxserve.completion import Completion, Delta
from jaxserve.tokenizer import Tokenizer


def prepare_output(as_json: bool) -> None:
    """Set the encoding of standard output.

    JSON is always UTF-8. Text has the terminal's encoding, in which a letter that it lacks becomes
    a question mark.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            encoding="utf-8" if as_json else None, errors="strict" if as_json else "replace"
        )


class JsonPrinter:
    """Printer of completions as JSON, one object per line."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def show(self, number: int, delta: Delta) -> None:
        """Print a completion when it is done; number is that of its prompt."""
        if delta.completion:
            done = {"prompt_index": number} | delta.completion.to_json(self._tokenizer)
            print(json.dumps(done, ensure_ascii=False), flush=True)

    def cut(self) -> None:
        """Do nothing: an answer that was interrupted has no completion, and no object."""


class TextPrinter:
    """Printer of text as it arrives, with a headline before each choice unless it is alone."""

    def __init__(self, alone: bool):
        self._alone = alone
        self._fresh = True

    def show(self, number: int, delta: Delta) -> None:
        """Print more text of a choice; number is that of its prompt."""
        if self._fresh and not self._alone:
            print(f"--- prompt {number + 1}, choice {delta.index + 1}")
        print(delta.text, end="\n" if delta.completion else "", flush=True)
        self._fresh = delta.completion is not None

    def cut(self) -> None:
        """End the line of an answer that was interrupted."""
        print()


def summary(done: list[Completion], seconds: float, padding: float) -> str:
    """Return one line: tokens, latencies, rate, cached tokens, share of padding, accepted drafts.

    TTFT and time per token are medians over the completions with at least one and two tokens.
    """
    # Choices of one prompt share its token ids, which count once.
    prompts = {id(c.prompt_token_ids): c for c in done}.values()
    tokens_in = sum(len(c.prompt_token_ids) for c in prompts)
    tokens_out = sum(len(c.token_ids) for c in done)
    ttft = _median([c.timings.ttft * 1e3 for c in done if c.token_ids], "TTFT {:.1f} ms")
    tpot = _median(
        [c.timings.tpot * 1e3 for c in done if len(c.token_ids) > 1], "{:.2f} ms per token"
    )
    cached = sum(c.timings.cached_tokens for c in done)
    drafted = sum(c.timings.drafted_tokens for c in done)
    accepted = sum(c.timings.accepted_tokens for c in done)
    drafts = f" | {accepted} of {drafted} drafts right" if drafted else ""
    return (
        f"{tokens_in} tokens in, {tokens_out} out | {ttft}{tpot}"
        f"{tokens_out / seconds:.0f} tokens/s | {cached} cached | {padding:.0%} padding{drafts}"
    )


def _median(values: list[float], text: str) -> str:
    return text.format(statistics.median(values)) + " | " if values else ""
