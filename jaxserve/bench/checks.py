"""Checks of flags: a ConfigError names the flag, its value and its bounds."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.config.option import flag_of, values_of
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error

MOST = 10_000_000  # of any number: more would fill the memory before the server refuses


def check_above(options: Any, low: float, *names: str) -> None:
    """Raise ConfigError for an option that was given and is not above `low`, or above MOST.

    Args:
        options: Dataclass of options.
    """
    values = values_of(options)
    for name in names:
        if values[name] is not None:
            _check(name, values[name], low, MOST)


def numbers(
    name: str, text: str | None, kind: Callable[[str], float], low: float, most: float = MOST
) -> list:
    """Return the numbers of an option such as 1,2,4; none if it was not given."""
    try:
        values = [] if text is None else [kind(part) for part in text.split(",")]
    except ValueError:
        raise flag_error(flag_of(name), text, "it must be a list like 1,2,4") from None
    for value in values:
        _check(name, value, low, most)
    return values


def _check(name: str, value: float, low: float, most: float) -> None:
    if not low < value <= most:
        limit = f"at most {most:,}" if value > most else f"above {low:g}"
        raise flag_error(flag_of(name), value, f"it must be {limit}")


def check_unused(options: Any, names: Sequence[str], why: str) -> None:
    """Raise ConfigError for the first of these options that was given.

    Args:
        options: Dataclass of options.
    """
    values = values_of(options)
    for name in names:
        if values[name] is not None and values[name] is not False:
            raise ConfigError(f"{flag_of(name)} {why}")
