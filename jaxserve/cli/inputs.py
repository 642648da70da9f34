"""Prompts and turns from flags, files and standard input."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from jaxserve.chat.conversation import turns_from_lines, typed_turns
from jaxserve.errors import RequestError


def read_turns(given: Sequence[str], file: Path | None, mark: str) -> Iterable[str]:
    """Return the turns of a conversation: those `given` and of the file, or of standard input.

    Turns of standard input are returned as they arrive.

    Args:
        mark: Text that is shown where a person types a turn.
    """
    if given or file:
        return read_prompts(given, file)
    if is_typed(given, file):
        return typed_turns(mark)
    return turns_from_lines(_standard_input().buffer)


def is_typed(given: Sequence[str], file: Path | None) -> bool:
    """Return whether a person types the turns, and can end an answer by Ctrl-C."""
    return not (given or file) and _standard_input().isatty()


def read_prompts(given: Iterable[str], file: Path | None) -> list[str]:
    """Return the prompts `given` and those of the file, or else standard input as one prompt."""
    prompts = list(given)
    if file:
        text = _decode(_read_file(file), "--prompts-file", f"is {file}; it ").removeprefix("\ufeff")
        prompts += filter(None, text.replace("\r\n", "\n").split("\n"))
        if not prompts:
            problem = f"is {file}; it has no prompts (one per line; empty lines are skipped)"
            raise RequestError("--prompts-file", problem)
    return prompts or [_read_standard_input()]


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"is {path}; it cannot be read: {error.strerror}"
        raise RequestError("--prompts-file", problem) from None


def _read_standard_input() -> str:
    if _standard_input().isatty():
        print("reading the prompt from standard input (end with Ctrl-D)", file=sys.stderr)
    return _decode(_standard_input().buffer.read(), "standard input").removesuffix("\n")


def _standard_input() -> TextIO:
    if sys.stdin is None or sys.stdin.closed:
        raise RequestError(
            "--prompt", "is missing, and there is no standard input to read one from"
        )
    return sys.stdin


def _decode(text: bytes, field: str, named: str = "") -> str:
    """Return a text; RequestError, whose problem begins with `named`, if it is not UTF-8."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"{named}is not UTF-8 text (byte {error.start}: {error.reason})"
        raise RequestError(field, problem) from None
