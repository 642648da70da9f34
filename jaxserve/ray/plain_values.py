"""Rows as programs write them, out of what Arrow makes of them."""

from typing import Any


def without_nulls(value: Any) -> Any:
    """Return a value without the fields of objects that are None.

    In a column of objects Arrow gives every row all fields that any of them has.
    """
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
