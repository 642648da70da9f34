"""Values of flags that are more than a number or a text, and the words that they are made of."""

import argparse
import json
import math
from pathlib import Path

MAX_INT32 = 2**31 - 1


def port_number(text: str) -> int:
    """Return a port, 0 to 65535."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def count_above_0(text: str) -> int:
    """Return a whole number above 0 and below 2^62."""
    return int(_above_0(text, int))


def number_above_0(text: str) -> float:
    """Return a number above 0 and below 2^62."""
    return _above_0(text, float)


def _above_0[T: (int, float)](text: str, kind: type[T]) -> T:
    try:
        value = kind(text)
    except ValueError:
        value = kind(0)
    if not 0 < value < 2**62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def int32(text: str, least: int = 0) -> int:
    """Return a whole number from `least` to the largest int32."""
    if not (text.isascii() and text.isdigit() and least <= int(text) <= MAX_INT32):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {least} to {MAX_INT32}"
        )
    return int(text)


def count(text: str) -> int:
    """Return a whole number from 1 to the largest int32."""
    return int32(text, least=1)


def finite(text: str, most: float = math.inf) -> float:
    """Return a finite number above 0, and at most `most`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value <= most and math.isfinite(value)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a finite number above 0" + (" up to 1" if most == 1 else "")
        )
    return value


def text_of_file(name: str) -> str:
    """Return the text of a file in UTF-8."""
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(
            f"{name}: {getattr(error, 'strerror', None) or error}"
        ) from None


def token_ids(text: str) -> list[int]:
    """Return the ids of a list such as 1,2,3."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids like 1,2,3"
        ) from None


def numbers_by_token(text: str) -> dict[int, float]:
    """Return the numbers of a JSON object by token id."""
    try:
        return {int(token): float(number) for token, number in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError):
        raise argparse.ArgumentTypeError(f'{text!r} is not an object like {{"17": -1.5}}') from None
