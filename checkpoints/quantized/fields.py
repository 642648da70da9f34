"""Reads quantization_config and refuses every field that is not understood."""

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoints.errors import CheckpointError


class Fields:
    """Reader of quantization_config, or of an object in it.

    `finish` refuses fields that were neither read nor ignored. A field that is null counts as
    absent.

    Args:
        where: Name of the object in error messages.
    """

    def __init__(self, where: str, fields: Any):
        if not isinstance(fields, Mapping):
            raise CheckpointError(f"config.json: {where} is {fields!r}; it must be an object")
        self.where = where
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._null = fields.keys() - self._fields.keys()
        self._seen = set[str]()

    def take(self, name: str, default: Any = None) -> Any:
        self._seen.add(name)
        return self._fields.get(name, default)

    def is_null(self, name: str) -> bool:
        """Return whether the field is there and null, where that says more than an absent one."""
        self._seen.add(name)
        return name in self._null

    def among(self, name: str, known: tuple[Any, ...], default: Any = None) -> Any:
        """Return a field that must have one of the known values; texts in either case."""
        value = self.take(name, default)
        value = value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(each) and value == each for each in known):
            implemented = ", ".join(map(repr, known))
            why = f"is not implemented (implemented: {implemented}; use another checkpoint)"
            raise self.refusal(name, value, why)
        return value

    def group_size(self) -> int:
        """Return how many inputs share a scale; -1 stands for all."""
        size = self.take("group_size", -1)
        if type(size) is not int or (size < 1 and size != -1):
            raise self.refusal("group_size", size, "is neither a positive integer nor -1")
        return size

    def empty(self, *names: str) -> None:
        """Accept fields that are absent or empty, and refuse others."""
        for name in names:
            value = self.take(name)
            if value:
                raise self.refusal(name, value, "is not implemented; use a checkpoint without it")

    def ignore(self, *names: str) -> None:
        """Accept fields that change no weight, whatever their values.

        They say how the checkpoint was made, or how another library should run it.
        """
        self._seen.update(names)

    def finish(self) -> None:
        """Raise CheckpointError for the first field that was neither read nor ignored."""
        unknown = sorted(set(self._fields) - self._seen)
        if unknown:
            raise self.refusal(
                unknown[0], self._fields[unknown[0]], "is not known, and could change the weights"
            )

    def refusal(self, name: str, value: Any, why: str) -> CheckpointError:
        """Return the error that refuses a field's value."""
        return CheckpointError(f"config.json: {self.where}: {name} {value!r} {why}")
