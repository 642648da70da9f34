"""Prompts and turns from flags, files and standard input."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from jaxserve.chat.conversation import turns_from_lines, typed_turns
from jaxserve.errors import RequestError


def read_turns(args: argparse.Namespace) -> Iterable[str]:
    """Return the turns of a conversation; those of standard input as they arrive."""
    if _given(args) or args.prompts_file:
        return prompts_of(args)
    if is_typed(args):
        return typed_turns("" if args.json else "> ")
    return turns_from_lines(_standard_input().buffer)


def is_typed(args: argparse.Namespace) -> bool:
    """Return whether a person types the turns, and can end an answer by Ctrl-C."""
    return not (_given(args) or args.prompts_file) and _standard_input().isatty()


def prompts_of(args: argparse.Namespace) -> list[str]:
    """Return the prompts of generate's arguments, flags and file, or else standard input."""
    return read_prompts(_given(args), args.prompts_file)


def _given(args: argparse.Namespace) -> list[str]:
    """Return the prompts on the command line: arguments first, then those of --prompt."""
    return [*args.texts, *(args.prompt or ())]


def read_prompts(given: Iterable[str], file: Path | None) -> list[str]:
    """Return the prompts `given` and those of the file, or else standard input as one prompt."""
    prompts = list(given)
    if file:
        name = str(file)
        text = _decode(_read_file(file), "--prompts-file", name).removeprefix("\ufeff")
        prompts += filter(None, text.replace("\r\n", "\n").split("\n"))
        if not prompts:
            raise RequestError(
                "--prompts-file", f"{name} has no prompts (one per line; empty lines are skipped)"
            )
    return prompts or [_read_standard_input()]


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError("--prompts-file", f"{path}: {error.strerror}") from None


def _read_standard_input() -> str:
    if _standard_input().isatty():
        print("reading the prompt from standard input (end with Ctrl-D)", file=sys.stderr)
    text = _decode(_standard_input().buffer.read(), "standard input", "the prompt")
    return text.removesuffix("\n")


def _standard_input() -> TextIO:
    if sys.stdin is None or sys.stdin.closed:
        raise RequestError(
            "--prompt", "is missing, and there is no standard input to read one from"
        )
    return sys.stdin


def _decode(text: bytes, field: str, what: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            field, f"{what} is not UTF-8 text (byte {error.start}: {error.reason})"
        ) from None
