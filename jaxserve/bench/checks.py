"""Bounds of flags: ConfigError names the flag, what it was given and what it may be."""

import argparse
from collections.abc import Callable, Sequence

from jaxserve.errors import ConfigError

MOST = 10_000_000  # of anything: more would fill the memory before it is refused


def check_above(args: argparse.Namespace, low: float, *names: str) -> None:
    """Those of the flags that were given; no more than MOST either."""
    for name in names:
        if getattr(args, name) is not None:
            _check(name, getattr(args, name), low, MOST)


def numbers(
    args: argparse.Namespace,
    name: str,
    kind: Callable[[str], float],
    low: float,
    most: float = MOST,
) -> list:
    """Of a flag such as 1,2,4; nothing when it was not given."""
    text: str | None = getattr(args, name)
    try:
        values = [] if text is None else [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag_of(name)} {text!r} is not a list like 1,2,4") from None
    for value in values:
        _check(name, value, low, most)
    return values


def _check(name: str, value: float, low: float, most: float) -> None:
    if not low < value <= most:
        limit = f"at most {most:,}" if value > most else f"above {low:g}"
        raise ConfigError(f"{flag_of(name)} {value:g}: it must be {limit}")


def check_unused(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """ConfigError for the first of these flags that was given."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False and value != []:
            raise ConfigError(f"{flag_of(name)} {why}")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")
