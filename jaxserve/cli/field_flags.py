"""Flags made from the fields of a dataclass, and the dataclass made from their values."""

import argparse
from dataclasses import Field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from jaxserve.config.option import flag_of, options_of


def add_flags(group: argparse._ArgumentGroup, kind: type, *, unset_is_none: bool = False) -> None:
    """Add a flag for every option of a dataclass; see `jaxserve.config.option`.

    unset_is_none: the value of a flag that is not given is None instead of the field's default, so
    that given_options can tell the two apart.
    """
    hints = get_type_hints(kind)
    for field in options_of(kind):
        default = None if unset_is_none else field.default
        hint = hints[field.name]
        if hint is bool:
            _add_switch(group, field, default)
        else:
            _add_value(group, field, hint, default)


def _add_switch(group: argparse._ArgumentGroup, field: Field[Any], default: object) -> None:
    on_by_default = field.default
    flag = flag_of(f"no_{field.name}" if on_by_default else field.name)
    action = "store_false" if on_by_default else "store_true"
    group.add_argument(
        flag, dest=field.name, action=action, default=default, help=field.metadata["help"]
    )


def _add_value(
    group: argparse._ArgumentGroup, field: Field[Any], hint: Any, default: object
) -> None:
    details = {key: field.metadata[key] for key in ("help", "metavar", "choices")}
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if isinstance(default, tuple):
        details |= {"action": "append", "default": []}  # argparse appends to a list
    else:
        details["default"] = default
    for parse in (int, float, Path):
        if parse in kinds:
            details["type"] = parse
    group.add_argument(flag_of(field.name), **details)


def given_options[T](kind: type[T], args: argparse.Namespace) -> T:
    """Return the dataclass with the options that were given, and its defaults otherwise."""
    values = {field.name: getattr(args, field.name, None) for field in options_of(kind)}
    return kind(**{name: value for name, value in values.items() if value is not None})
