"""The reading of quantization_config that refuses what nobody understood."""

from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CheckpointError


class Fields:
    """quantization_config, or an object in it: every field is taken, ignored on purpose, or
    reported by `finish`.

    where: how messages name it. A field that is null counts as absent.
    """

    def __init__(self, where: str, fields: Any):
        if not isinstance(fields, Mapping):
            raise CheckpointError(f"config.json: {where} is {fields!r}; it must be an object")
        self.where = where
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._seen = set[str]()

    def take(self, name: str, default: Any = None) -> Any:
        self._seen.add(name)
        return self._fields.get(name, default)

    def among(self, name: str, known: tuple[Any, ...], default: Any = None) -> Any:
        """The field, which must be one of these, the letters of a text in either case."""
        value = self.take(name, default)
        value = value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(each) and value == each for each in known):
            implemented = ", ".join(map(repr, known))
            raise self.refusal(
                name,
                value,
                f"is not implemented (implemented: {implemented}; use another checkpoint)",
            )
        return value

    def group_size(self) -> int:
        """How many inputs share a scale; -1: all."""
        size = self.take("group_size", -1)
        if type(size) is not int or (size < 1 and size != -1):
            raise self.refusal("group_size", size, "is neither a positive integer nor -1")
        return size

    def empty(self, *names: str) -> None:
        """Fields that may be there, but not with anything in them."""
        for name in names:
            value = self.take(name)
            if value:
                raise self.refusal(name, value, "is not implemented; use a checkpoint without it")

    def ignore(self, *names: str) -> None:
        """Fields that change no weight: how the checkpoint was made, or how another library is to
        run it.
        """
        self._seen.update(names)

    def finish(self) -> None:
        unknown = sorted(set(self._fields) - self._seen)
        if unknown:
            raise self.refusal(
                unknown[0], self._fields[unknown[0]], "is not known, and could change the weights"
            )

    def refusal(self, name: str, value: Any, why: str) -> CheckpointError:
        return CheckpointError(f"config.json: {self.where}: {name} {value!r} {why}")
