"""Checks of flags: a ConfigError names the flag, its value and its bounds."""

import argparse
from collections.abc import Callable, Sequence

from jaxserve.config.option import flag_of
from jaxserve.errors import ConfigError, flag_text

MOST = 10_000_000  # of any number: more would fill the memory before the server refuses


def check_above(args: argparse.Namespace, low: float, *names: str) -> None:
    """Raise ConfigError for a flag that was given and is not above `low`, or above MOST."""
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
    """Return the numbers of a flag such as 1,2,4; none if it was not given."""
    text: str | None = getattr(args, name)
    try:
        values = [] if text is None else [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(flag_text(flag_of(name), text, "it must be a list like 1,2,4")) from None
    for value in values:
        _check(name, value, low, most)
    return values


def _check(name: str, value: float, low: float, most: float) -> None:
    if not low < value <= most:
        limit = f"at most {most:,}" if value > most else f"above {low:g}"
        raise ConfigError(flag_text(flag_of(name), value, f"it must be {limit}"))


def check_unused(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ConfigError for the first of these flags that was given."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False and value != []:
            raise ConfigError(f"{flag_of(name)} {why}")
