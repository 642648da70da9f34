"""Dataclass fields that are command-line flags as well: one declaration for both.

`jaxserve.cli.field_flags` makes the flags, and reads the dataclass from their values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Any

from jaxserve.flag_errors import flag_error

Bounds = tuple[float, float]  # the least and the greatest value, both allowed
UNBOUNDED = 2**50  # greatest value of options that only the machine limits


def flag(
    help: str,
    *,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    bounds: Bounds | None = None,
    parse: Callable[[str], object] | None = None,
    **details: Any,
) -> dict[str, Any]:
    """Return the metadata that makes a dataclass field an option with this help text.

    The flag is named after the field. A bool that is True by default becomes `--no-NAME`; a field
    whose default is a tuple becomes a flag that may be given several times, unless it has `parse`.

    Args:
        help: Help text of the flag.
        metavar: Name of the value in the help.
        choices: The only values that are taken.
        bounds: The least and the greatest value; whoever uses the value checks them.
        parse: Function that makes the value of a word, and raises argparse.ArgumentTypeError for a
            word that it refuses; without it the field's type decides.
        details: More of what `argparse.ArgumentParser.add_argument` takes; `names`: its names in
            place of the usual one, those of an argument without "--".
    """
    given = {"help": help, "metavar": metavar, "choices": choices, "type": parse} | details
    return {"option": given, "bounds": bounds}


def option[T](default: T, help: str, **details: Any) -> T:
    """Declare a dataclass field that is an option. Arguments as in `flag`."""
    return field(default=default, metadata=flag(help, **details))


def required(help: str, **details: Any) -> Any:
    """Declare an option that has to be given. Arguments as in `flag`."""
    return field(metadata=flag(help, **details))


def options[T](kind: type[T], title: str | None = None) -> T:
    """Declare a dataclass field whose value is another dataclass of options.

    `title` names a group in the help; None leaves the flags in the group around them.
    """
    return field(default_factory=kind, metadata={"options": kind, "title": title})


def given_options(kind: type, title: str | None = None) -> Mapping[str, Any]:
    """Declare a dataclass field with those options of another dataclass that were given, by name.

    `title` is as in `options`.
    """
    return field(default_factory=dict, metadata={"given": kind, "title": title})


def one_of_given(kind: type) -> dict[str, Any]:
    """Return the metadata of a field that at most one option of another dataclass decides."""
    return {"given": kind, "title": None, "exclusive": True}


def options_of(kind: type) -> list[Field[Any]]:
    """Return the fields of a dataclass that are flags, in their order."""
    return [field for field in fields(kind) if "option" in field.metadata]


def values_of(options: Any) -> dict[str, Any]:
    """Return the values of a dataclass of options, and of those inside of it, by their names."""
    values = {}
    for each in fields(options):
        value = getattr(options, each.name)
        if "option" in each.metadata:
            values[each.name] = value
        elif "options" in each.metadata:
            values |= values_of(value)
        elif "given" in each.metadata:
            values |= value
    return values


def bounds_of(kind: type, name: str) -> Bounds:
    """Return the least and the greatest value of an option that was declared with bounds."""
    (field,) = (field for field in options_of(kind) if field.name == name)
    return field.metadata["bounds"]


def check_bounds(name: str, value: float, bounds: Bounds) -> None:
    """Raise ConfigError for a value of the option `name` that is out of bounds."""
    low, high = bounds
    if low <= value <= high:
        return
    if value < low and high == UNBOUNDED:
        expected = f"it must be at least {low}"
    else:
        expected = f"it must be between {low} and {high}"
    raise flag_error(flag_of(name), value, expected)


def flag_of(name: str) -> str:
    """Return the flag of a field, such as `--max-batch` of `max_batch`."""
    return f"--{name.replace('_', '-')}"
