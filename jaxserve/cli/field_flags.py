"""Flags made from the fields of a dataclass, and the dataclass made from their values.

`jaxserve.config.option` declares the fields.
"""

import argparse
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from jaxserve.config.option import flag_of


def add_flags(
    container: argparse._ActionsContainer, kind: type, *, unset_is_none: bool = False
) -> None:
    """Add a flag for every option of a dataclass and of those inside of it, in their order.

    Args:
        unset_is_none: Whether a flag that is not given is None instead of the field's default.
    """
    hints = get_type_hints(kind)
    for field in fields(kind):
        if "option" in field.metadata:
            _add_flag(container, field, hints[field.name], unset_is_none)
        elif inner := field.metadata.get("options"):
            add_flags(_group(container, field), inner, unset_is_none=unset_is_none)
        elif inner := field.metadata.get("given"):
            add_flags(_group(container, field), inner, unset_is_none=True)


def _group(container: argparse._ActionsContainer, field: Field[Any]) -> argparse._ActionsContainer:
    title = field.metadata["title"]
    if field.metadata.get("exclusive"):
        return container.add_mutually_exclusive_group()
    return container.add_argument_group(title) if title else container


def _add_flag(
    container: argparse._ActionsContainer, field: Field[Any], hint: Any, unset_is_none: bool
) -> None:
    given = {key: value for key, value in field.metadata["option"].items() if value is not None}
    name = f"no_{field.name}" if field.default is True else field.name
    names = given.pop("names", (flag_of(name),))
    details = _details(field, hint) | given
    if unset_is_none:
        details["default"] = None
    if names[0].startswith("-"):
        details["dest"] = field.name
    container.add_argument(*names, **details)


def _details(field: Field[Any], hint: Any) -> dict[str, Any]:
    """Return what the type and the default of a field say of its flag."""
    if hint is bool:
        action = "store_false" if field.default else "store_true"
        return {"action": action, "default": field.default}
    details: dict[str, Any] = {}
    if field.default is not MISSING:
        details["default"] = field.default
    if _is_repeated(field):
        details |= {"action": "append", "default": []}  # argparse appends to a list
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for parse in (int, float, Path):
        if parse in kinds:
            details["type"] = parse
    return details


def _is_repeated(field: Field[Any]) -> bool:
    return isinstance(field.default, tuple) and field.metadata["option"]["type"] is None


def options_from[T](kind: type[T], args: argparse.Namespace) -> T:
    """Return the dataclass with the values of its flags."""
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if "option" in field.metadata:
            values[field.name] = _value(field, args)
        elif inner := field.metadata.get("options"):
            values[field.name] = options_from(inner, args)
        elif inner := field.metadata.get("given"):
            values[field.name] = given_from(inner, args)
    return kind(**values)


def given_from(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return those options of a dataclass whose flags were given, by name.

    The flags are made with unset_is_none.
    """
    values = {}
    for field in fields(kind):
        if "option" in field.metadata:
            value = _value(field, args)
        elif inner := field.metadata.get("given"):
            value = given_from(inner, args) or None
        else:
            continue
        if value is not None:
            values[field.name] = value
    return values


def _value(field: Field[Any], args: argparse.Namespace) -> Any:
    value = getattr(args, field.name)
    return tuple(value) if isinstance(value, list) and isinstance(field.default, tuple) else value
