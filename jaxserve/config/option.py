"""Dataclass fields that are command-line flags as well: one declaration for both.

`jaxserve.cli.field_flags` makes the flags.
"""

from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any

Bounds = tuple[int, int]  # the least and the greatest value, both allowed
UNBOUNDED = 2**50


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
    """Return the least and the greatest value that an option of a dataclass may have."""
    (field,) = (field for field in options_of(kind) if field.name == name)
    return field.metadata["bounds"]


def flag_of(name: str) -> str:
    """Return the flag of a field, such as `--max-batch` of `max_batch`."""
    return f"--{name.replace('_', '-')}"
