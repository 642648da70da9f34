"""Progress bars, completions as text or JSON, and the closing line."""

import io
import json
import statistics
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.completion import Completion, Delta
from jaxserve.tokenizer import Tokenizer


def prepare_output(as_json: bool) -> None:
    """JSON is UTF-8 whatever the terminal speaks; of text, a letter that the terminal lacks becomes
    a question mark.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            encoding="utf-8" if as_json else None, errors="strict" if as_json else "replace"
        )


class Bar:
    """A progress bar that appears with the first update and disappears with the last."""

    def __init__(self, console: Console, title: str):
        columns = (
            TextColumn(f"{title:9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = None

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int, what: str) -> None:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, completed=done, total=total, description=what)
        if done >= total:
            self._progress.stop()


class JsonPrinter:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def show(self, number: int, delta: Delta) -> None:
        if delta.completion:
            done = {"prompt_index": number} | delta.completion.to_json(self._tokenizer)
            print(json.dumps(done, ensure_ascii=False), flush=True)

    def cut(self) -> None:
        """An answer that was interrupted has no completion, and no object."""


class TextPrinter:
    """Text as it comes, a headline before each choice unless there is only one."""

    def __init__(self, alone: bool):
        self._alone = alone
        self._fresh = True

    def show(self, number: int, delta: Delta) -> None:
        if self._fresh and not self._alone:
            print(f"--- prompt {number + 1}, choice {delta.index + 1}")
        print(delta.text, end="\n" if delta.completion else "", flush=True)
        self._fresh = delta.completion is not None

    def cut(self) -> None:
        print()


def summary(done: list[Completion], seconds: float, padding: float) -> str:
    """One line: tokens, rates, what came from the cache, and the share of computed tokens that were
    padding.

    TTFT and time per token are medians over the completions that have one: a first token, a second
    token.
    """
    prompts = {id(c.prompt_token_ids): c for c in done}.values()
    tokens_in, tokens_out = (
        sum(len(c.prompt_token_ids) for c in prompts),
        sum(len(c.token_ids) for c in done),
    )
    ttft = _median([c.timings.ttft * 1e3 for c in done if c.token_ids], "TTFT {:.1f} ms")
    tpot = _median(
        [c.timings.tpot * 1e3 for c in done if len(c.token_ids) > 1], "{:.2f} ms per token"
    )
    cached = sum(c.timings.cached_tokens for c in done)
    drafted, accepted = (
        sum(getattr(c.timings, f"{name}_tokens") for c in done) for name in ("drafted", "accepted")
    )
    drafts = f" | {accepted} of {drafted} drafts right" if drafted else ""
    return (
        f"{tokens_in} tokens in, {tokens_out} out | {ttft}{tpot}"
        f"{tokens_out / seconds:.0f} tokens/s | {cached} cached | {padding:.0%} padding{drafts}"
    )


def _median(values: list[float], text: str) -> str:
    return text.format(statistics.median(values)) + " | " if values else ""
