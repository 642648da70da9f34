"""Dataclass fields that are command-line flags as well: one declaration for both.

`jaxserve.cli.field_flags` makes the flags.
"""

from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any

from jaxserve.errors import ConfigError, flag_text

Bounds = tuple[int, int]  # the least and the greatest value, both allowed
UNBOUNDED = 2**50  # greatest value of options that only the machine limits


def flag(
    help: str,
    *,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    bounds: Bounds | None = None,
) -> dict[str, Any]:
    """Return the metadata that makes a dataclass field an option with this help text.

    The flag is named after the field. A bool that is True by default becomes `--no-NAME`; a tuple
    becomes a flag that may be given several times.
    """
    return {"help": help, "metavar": metavar, "choices": choices, "bounds": bounds}


def options_of(kind: type) -> list[Field[Any]]:
    """Return the fields of a dataclass that are flags, in their order."""
    return [field for field in fields(kind) if "help" in field.metadata]


def bounds_of(kind: type, name: str) -> Bounds:
    """Return the least and the greatest value of an option that was declared with bounds."""
    (field,) = (field for field in options_of(kind) if field.name == name)
    return field.metadata["bounds"]


def check_bounds(name: str, value: int, bounds: Bounds) -> None:
    """Raise ConfigError for a value of the option `name` that is out of bounds."""
    low, high = bounds
    if low <= value <= high:
        return
    if value < low and high == UNBOUNDED:
        expected = f"it must be at least {low}"
    else:
        expected = f"it must be between {low} and {high}"
    raise ConfigError(flag_text(flag_of(name), value, expected))


def flag_of(name: str) -> str:
    """Return the flag of a field, such as `--max-batch` of `max_batch`."""
    return f"--{name.replace('_', '-')}"
