"""Output of the programs: completions as text or JSON, and the last line."""

import io
import json
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

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
    """Printer of text as it arrives, with a headline before each choice unless it is alone.

    Args:
        prompts: Prompts, each shown dimmed before its text on a terminal; empty shows none.
    """

    def __init__(self, alone: bool, prompts: Sequence[str] = ()):
        self._alone = alone
        self._fresh = True
        self._console = Console(highlight=False)
        self._prompts = prompts if self._console.is_terminal else ()

    def show(self, number: int, delta: Delta) -> None:
        """Print more text of a choice; number is that of its prompt."""
        if self._fresh and not self._alone:
            print(f"--- prompt {number + 1}, choice {delta.index + 1}")
        if self._fresh and self._prompts:
            prompt = Text(self._prompts[number], "dim")
            self._console.print(prompt, end="", soft_wrap=True)
        print(delta.text, end="\n" if delta.completion else "", flush=True)
        self._fresh = delta.completion is not None

    def cut(self) -> None:
        """End the line of an answer that was interrupted."""
        print()


def model_line(
    name: str, parameters: int, precision: str, nbytes: int, kind: str, devices: int
) -> str:
    """Return one line about a loaded model: `tiny-chat  4.4 M  bfloat16  8 MiB  cpu`.

    Args:
        nbytes: Bytes of all weights.
        kind: Kind of the devices that the model is on.
    """
    number = f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
    size = f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
    place = kind if devices == 1 else f"{devices} x {kind}"
    return "  ".join((name, number, precision, size, place))


def summary(done: list[Completion], seconds: float, padding: float | None) -> str:
    """Return one line: tokens, latencies, rate, cached tokens, share of padding, accepted drafts.

    TTFT and time per token are medians over the completions with at least one and two tokens.

    Args:
        padding: Share of padding; None leaves it out.
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
    padded = f" | {padding:.0%} padding" if padding is not None else ""
    drafts = f" | {accepted} of {drafted} drafts right" if drafted else ""
    return (
        f"{tokens_in} tokens in, {tokens_out} out | {ttft}{tpot}"
        f"{tokens_out / seconds:.0f} tokens/s | {cached} cached{padded}{drafts}"
    )


def _median(values: list[float], text: str) -> str:
    return text.format(statistics.median(values)) + " | " if values else ""
